"""Random tiny Hugging Face models, written to folders by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from hypothesis import strategies as st
from tokenizers import models

transformers.logging.disable_progress_bar()
_VOCAB_SIZES = st.integers(5, 70)


@st.composite
def gpt2_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Return settings of a GPT-2 with any number of heads, tied or untied, with or without an explicit inner size."""
    heads, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return {
        "model_type": "gpt2",
        "vocab_size": draw(_VOCAB_SIZES),
        "n_positions": draw(st.integers(2, 30)),
        "n_embd": heads * size,
        "n_layer": draw(st.integers(1, 3)),
        "n_head": heads,
        "n_inner": draw(st.none() | st.integers(1, 40)),
        "activation_function": draw(st.sampled_from(["gelu_new", "gelu", "relu", "gelu_pytorch_tanh"])),
        "resid_pdrop": (rate := draw(st.sampled_from([0.0, 0.1]))),
        "embd_pdrop": rate,
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-3])),
        "tie_word_embeddings": draw(st.booleans()),
    }


_LENGTH = {"factor": 4.0, "original_max_position_embeddings": 8}
SCALINGS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", **_LENGTH, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", **_LENGTH, "beta_fast": 8.0, "truncate": False},
        {"rope_type": "yarn", **_LENGTH, "mscale": 1.0, "mscale_all_dim": 0.5},
    ]
)


@st.composite
def llama_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Return settings of a Llama with grouped queries, heads of any even size, biases or none, tied or untied."""
    groups, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, size = groups * share, 2 * draw(st.integers(1, 4))
    bias = draw(st.booleans())
    return {
        "model_type": "llama",
        "vocab_size": draw(_VOCAB_SIZES),
        "max_position_embeddings": draw(st.integers(2, 30)),
        "hidden_size": heads * draw(st.integers(1, 6)),
        "intermediate_size": draw(st.integers(1, 40)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([10000.0, 500000.0])), **draw(SCALINGS)},
        "attention_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def other_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Return settings of a Mistral without a window, or of a Qwen3."""
    hub = {**draw(llama_settings()), "model_type": draw(st.sampled_from(["mistral", "qwen3"])), "sliding_window": None}
    return {name: value for name, value in hub.items() if name not in ("attention_bias", "mlp_bias")}


GPT2 = {"model_type": "gpt2", "vocab_size": 37, "n_positions": 16, "n_embd": 15, "n_layer": 2, "n_head": 3}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MISTRAL = {**LLAMA, "model_type": "mistral"}
_SCALED = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
_LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}, "full_attention": _SCALED}
_ODD = {**LLAMA, "num_hidden_layers": 5, "hidden_size": 18, "intermediate_size": 14, "pad_token_id": None}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4}}
# Divisors of the rates of two pairs of channels.
PAIRS = {"short_factor": [1.0, 1.5], "long_factor": [1.25, 4.0]}
_DEEP = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": True}
_DEEP |= {"original_max_position_embeddings": 8, "attention_factor": 0.9, "mscale_all_dim": 1.1}
_LATENT = {"num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 6, "first_k_dense_replace": 5}
_LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 1e-6}
_GROUPS = {"first_k_dense_replace": 2, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4}
_GROUPS |= {"moe_intermediate_size": 10, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3}
# A small model of each type with odd sizes and every switch of the type on.
HUB_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_ODD, "hidden_size": 60, "attention_bias": True, "rope_parameters": _SCALED},
    "mistral": {**_ODD, "head_dim": 10, "sliding_window": 5, **_ROPE},
    "ministral3": {
        **_ODD,
        "head_dim": 10,
        "sliding_window": 5,
        "rope_parameters": {
            **{name: value for name, value in _DEEP.items() if name not in ("mscale_all_dim", "attention_factor")},
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "llama4_text": {
        **_ODD,
        "head_dim": 10,
        "attention_bias": True,
        "intermediate_size_mlp": 22,
        "num_local_experts": 5,
        "moe_layers": [1, 2, 4],
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 16,
        "floor_scale": 3,
        "attn_scale": 0.7,
        **_ROPE,
    },
    "qwen2": {**_ODD, "head_dim": 10, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, **_ROPE},
    "qwen3": {**_ODD, "head_dim": 10, "attention_bias": True, **_ROPE},
    "smollm3": {
        **_ODD,
        "hidden_size": 60,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
        "mlp_bias": True,
        **_ROPE,
    },
    "olmo": {**_ODD, "hidden_size": 60, "attention_bias": True, "clip_qkv": 0.5, "rope_parameters": _SCALED},
    "olmo2": {**_ODD, "hidden_size": 60, "attention_bias": True, "rope_parameters": _SCALED},
    "olmo3": {**_ODD, "hidden_size": 60, "sliding_window": 5, "rope_parameters": _LOCAL},
    "phi3": {
        **_ODD,
        "hidden_size": 60,
        "sliding_window": 7,
        "original_max_position_embeddings": 8,
        "rope_parameters": {**_PARTIAL["rope_parameters"], "rope_type": "longrope", **PAIRS},
    },
    "granite": {
        **_ODD,
        "hidden_size": 60,
        "attention_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        **_ROPE,
    },
    "starcoder2": {**_ODD, "hidden_size": 60, "sliding_window": 7, **_ROPE},
    "nemotron": {**_ODD, "head_dim": 10, "attention_bias": True, "mlp_bias": True, **_PARTIAL},
    "glm4": {**_ODD, "head_dim": 10, "attention_bias": True, **_PARTIAL},
    "ernie4_5": {**_ODD, "head_dim": 10, "use_bias": True, "tie_word_embeddings": False, **_ROPE},
    "hunyuan_v1_dense": {**_ODD, "head_dim": 10, "attention_bias": True, **_ROPE},
    "hunyuan_v1_moe": {
        **_ODD,
        "head_dim": 10,
        "attention_bias": True,
        "num_experts": 5,
        "moe_topk": 3,
        **_ROPE,
    },
    "apertus": {**_ODD, "hidden_size": 60, "attention_bias": True, **_ROPE},
    "cohere": {**_ODD, "hidden_size": 60, "attention_bias": True, "logit_scale": 0.3, **_ROPE},
    "cohere2": {
        **_ODD,
        "hidden_size": 60,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "tie_word_embeddings": False,
        **_ROPE,
    },
    "gemma": {**_ODD, "head_dim": 10, "attention_bias": True, **_ROPE},
    "gpt_neox": {
        "vocab_size": 37,
        "max_position_embeddings": 16,
        "hidden_size": 60,
        "intermediate_size": 14,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "attention_bias": False,
        **_PARTIAL,
    },
    "deepseek_v2": {
        **_ODD,
        **_LATENT,
        "q_lora_rank": None,
        "attention_bias": True,
        **_GROUPS,
        "topk_method": "group_limited_greedy",
        **_ROPE,
    },
    "deepseek_v3": {
        **_ODD,
        **_LATENT,
        **_GROUPS,
        "num_mtp_layers": 0,
        "attention_bias": True,
        "rope_parameters": _DEEP,
    },
    "glm4_moe": {
        **_ODD,
        **_GROUPS,
        "head_dim": 10,
        "num_mtp_layers": 0,
        "use_qk_norm": True,
        "attention_bias": True,
        **_PARTIAL,
    },
    "mixtral": {**_ODD, "head_dim": 10, "sliding_window": 5, "num_local_experts": 5, **_ROPE},
    "gpt_oss": {
        **_ODD,
        "head_dim": 10,
        "sliding_window": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "rope_parameters": {name: value for name, value in _DEEP.items() if name != "mscale_all_dim"},
    },
    "qwen2_moe": {
        **_ODD,
        **_EXPERTS,
        "hidden_size": 60,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 15,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "qkv_bias": True,
        **_ROPE,
    },
    "qwen3_moe": {
        **_ODD,
        **_EXPERTS,
        "moe_intermediate_size": 10,
        "head_dim": 10,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        **_ROPE,
    },
    "minimax_m2": {**_ODD, "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, **_PARTIAL},
    "olmoe": {**_ODD, **_EXPERTS, "hidden_size": 60, "attention_bias": True, "clip_qkv": 0.5, **_ROPE},
    "gemma2": {
        **_ODD,
        "head_dim": 10,
        "sliding_window": 5,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **_ROPE,
    },
    "gemma3_text": {
        **_ODD,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "query_pre_attn_scalar": 7,
        "final_logit_softcapping": 3.0,
        "rope_parameters": _LOCAL,
    },
}
HUB_FAMILIES = {name: {**hub, "model_type": name} for name, hub in HUB_FAMILIES.items()}
# Fields that types need besides their defaults, which describe models that do not convert.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v3": {"first_k_dense_replace": 61},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "llama4_text": {"max_position_embeddings": 8192},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 12000000.0}},
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 4}


def write_hub(
    folder: Path,
    settings: dict[str, Any],
    seed: int = 0,
    max_shard_size: str = "5GB",
    auto: Any = transformers.AutoModelForCausalLM,
) -> Path:
    """Write a model with random weights, biases and norm scales, and a tokenizer of two words; return the folder.

    `auto` makes the model of its settings.
    """
    torch.manual_seed(seed)
    settings = {"bos_token_id": None, "eos_token_id": None, **settings}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = auto.from_config(config)
    for param in model.parameters():
        param.data.normal_(std=0.4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json with four tokens."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "<|endoftext|>": 3}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
