"""What each model type of Hugging Face computes otherwise than Llama, for the reference forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """What a model type computes otherwise than Llama.

    Attributes:
        defaults: values of absent fields.
        norm: "rms", "rms + 1" (multiplies by 1 + weight), "layer", "layer + 1", or "plain layer" without weights.
        epsilon: field of the norms' epsilon.
        before, after: names of the norms on the inputs, and on the outputs, of attention and MLP.
        head_norms: queries and keys are normalized over "head" or "projection", or not ("").
        mlp: names of the gate (none: ""), of the projection up, and of the one down; "gate_up_proj" holds both.
        has_bias: fields that switch biases on in q, k and v, in attention's output, and in the MLP; True: always.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        scale: field of the number whose inverse root multiplies the scores.
        local_base: rotary base of layers with a window, where they have one of their own.
        is_latent: keys and values come from a latent.
        turns_neighbours: channels 2i and 2i + 1 of a head are rotated together.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "rms"
    epsilon: str = "rms_norm_eps"
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    head_norms: str = ""
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_bias: tuple[str | bool, str | bool, str | bool] = ("attention_bias", "attention_bias", "mlp_bias")
    scales_embedding: bool = False
    scale: str = ""
    local_base: str = ""
    is_latent: bool = False
    turns_neighbours: bool = False


_OLMO = Decoder({"eps": 1e-5}, norm="plain layer", epsilon="eps")
_OLMO2 = Decoder(
    {"rms_norm_eps": 1e-5},
    before=None,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms="projection",
)
# Gemma's activation, whatever `hidden_act` says: the first releases say gelu and mean its approximation by tanh.
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA = Decoder({"head_dim": 256, "tie_word_embeddings": True, **_GELU}, norm="rms + 1", scales_embedding=True)
_LATER_GEMMA = replace(
    _GEMMA,
    defaults={**_GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    scale="query_pre_attn_scalar",
)
DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(),
    "mistral": Decoder({"num_key_value_heads": 8}),
    "qwen2": Decoder(
        {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28}, has_bias=(True, False, False)
    ),
    "qwen3": Decoder(
        {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
        head_norms="head",
    ),
    "smollm3": Decoder(
        {
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        }
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "full_every": 4},
        local_base="rope_theta",
    ),
    "phi3": Decoder({"rms_norm_eps": 1e-5}, mlp=("", "gate_up_proj", "down_proj"), has_bias=(False, False, False)),
    "granite": Decoder({"attention_multiplier": 1.0}),
    "starcoder2": Decoder(
        {
            "use_bias": True,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        norm="layer",
        epsilon="norm_epsilon",
        mlp=("", "c_fc", "c_proj"),
        has_bias=("use_bias", "use_bias", "use_bias"),
    ),
    "nemotron": Decoder(
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        norm="layer + 1",
        epsilon="norm_eps",
        mlp=("", "up_proj", "down_proj"),
    ),
    "deepseek_v2": Decoder({"kv_lora_rank": 512}, is_latent=True, has_bias=(False, "attention_bias", "mlp_bias")),
    "deepseek_v3": Decoder({"rope_interleave": True}, is_latent=True, has_bias=(False, "attention_bias", False)),
    "mixtral": Decoder(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        has_bias=(False, False, False),
    ),
    "gpt_oss": Decoder(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "full_every": 2,
            "attention_bias": True,
            "num_experts_per_tok": 4,
        }
    ),
    "qwen2_moe": Decoder(
        {"num_key_value_heads": 16, "num_experts_per_tok": 4, "qkv_bias": True}, has_bias=("qkv_bias", False, False)
    ),
    "qwen3_moe": Decoder(
        {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096}, head_norms="head"
    ),
    "glm4_moe": Decoder(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False},
        head_norms="head",
        has_bias=("attention_bias", False, False),
    ),
    "olmoe": Decoder({"rms_norm_eps": 1e-5}, head_norms="projection"),
    "glm4": Decoder(
        {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True},
        after=("post_self_attn_layernorm", "post_mlp_layernorm"),
        mlp=("", "gate_up_proj", "down_proj"),
        has_bias=("attention_bias", False, False),
        turns_neighbours=True,
    ),
    "ernie4_5": Decoder(
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        has_bias=("use_bias", "use_bias", "use_bias"),
        turns_neighbours=True,
    ),
    "gemma": replace(_GEMMA, defaults={**_GEMMA.defaults, "num_key_value_heads": 16}),
    "gemma2": replace(
        _LATER_GEMMA,
        defaults={
            **_LATER_GEMMA.defaults,
            "full_every": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": replace(
        _LATER_GEMMA,
        defaults={**_LATER_GEMMA.defaults, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "full_every": 6},
        head_norms="head",
        local_base="rope_local_base_freq",
    ),
}
