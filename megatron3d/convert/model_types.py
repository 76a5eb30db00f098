"""The fields of config.json by model type of Hugging Face: tables from which both directions of conversion follow.

    model.num_layers = 12        gpt2: n_layer = 12        llama: num_hidden_layers = 12

Field names and defaults are those of the configuration classes of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron3d.convert.expert_types import EXPERT_TYPES
from megatron3d.convert.gemma_types import GEMMA_TYPES
from megatron3d.convert.hub_fields import AllowedValues, FieldMapping, ModelType
from megatron3d.convert.latent_types import LATENT_TYPES
from megatron3d.convert.rotary_fields import COMMON, NO_WINDOWS
from megatron3d.convert.rotary_types import ROTARY_TYPES
from megatron3d.model.architecture import Architecture


def _gpt2_obstacles(arch: Architecture) -> Iterator[str]:
    if arch.num_query_groups != arch.num_attention_heads:
        yield f"num_query_groups={arch.num_query_groups}: gpt2 has one per head, {arch.num_attention_heads}"
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        yield f"kv_channels={arch.kv_channels}: gpt2's heads have hidden_size / num_attention_heads channels"


MODEL_TYPES: Mapping[str, ModelType] = {
    "gpt2": ModelType(
        class_name="GPT2LMHeadModel",
        family="gpt2",
        fields={
            "num_layers": FieldMapping(("n_layer",), 12),
            "hidden_size": FieldMapping(("n_embd",), 768),
            "ffn_hidden_size": FieldMapping(("n_inner",), None),
            "num_attention_heads": FieldMapping(("n_head",), 12),
            "max_position_embeddings": FieldMapping(("n_positions",), 1024),
            "vocab_size": FieldMapping(("vocab_size",), 50257),
            "norm_epsilon": FieldMapping(("layer_norm_epsilon",), 1e-5),
            "tie_embeddings": FieldMapping(("tie_word_embeddings",), True),
            "hidden_dropout": FieldMapping(("resid_pdrop", "embd_pdrop"), 0.1),
            "attention_dropout": FieldMapping(("attn_pdrop",), 0.1),
            "init_method_std": FieldMapping(("initializer_range",), 0.02),
        },
        activation=(
            "activation_function",
            "gelu_new",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
        ),
        fixed={
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "qk_layernorm": False,
        },
        obstacles=_gpt2_obstacles,
        rules={
            **COMMON,
            **NO_WINDOWS,
            "scale_attn_weights": AllowedValues((True,), "scores are divided by the root of a head's size"),
            "scale_attn_by_inverse_layer_idx": AllowedValues((False,), "all layers scale their scores alike"),
            "reorder_and_upcast_attn": AllowedValues((False,), "attention is computed in one way"),
        },
        has_rope=False,
        body="transformer.",
        as_zeros={"add_bias_linear": False},
    ),
    **ROTARY_TYPES,
    **GEMMA_TYPES,
    **LATENT_TYPES,
    **EXPERT_TYPES,
}
