"""Fact: with the same weights our model computes what classes of transformers do: logits, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.peers import compare

SIZES = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "hidden_size": 20,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
OURS = {
    "family": "llama",
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 64,
    "hidden_size": 20,
    "ffn_hidden_size": 14,
    "num_layers": 3,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 10,
    "norm_epsilon": 1e-6,
}
BASE = {"rope_theta": 500.0}

# Class of transformers with its settings, and our keys.
PEERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", "rope_parameters": {**BASE, "rope_type": "default"}}, {"rotary_base": 500.0}),
    "linear scaling": (
        {"model_type": "llama", "rope_parameters": {**BASE, "rope_type": "linear", "factor": 3.0}},
        {"rotary_base": 500.0, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
    ),
    "llama 3.1": (
        {
            "model_type": "llama",
            "rope_parameters": {
                **BASE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rotary_base": 500.0,
            "rotary_scaling": "llama3",
            "rotary_scaling_factor": 8.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (
        {
            "model_type": "llama",
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rotary_base": 500.0,
            "rotary_scaling": "yarn",
            "rotary_scaling_factor": 4.0,
            "rotary_beta_fast": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3": (
        {"model_type": "qwen3", "rope_parameters": {**BASE, "rope_type": "default"}},
        {"rotary_base": 500.0, "qk_layernorm": True},
    ),
    "layers without positions": (
        {"model_type": "smollm3", "rope_parameters": {**BASE, "rope_type": "default"}, "no_rope_layer_interval": 2},
        {"rotary_base": 500.0, "no_rope_freq": 2, "tie_embeddings": True},
    ),
    "part of each head": (
        {
            "model_type": "glm4_moe",
            "first_k_dense_replace": 3,
            "n_routed_experts": 2,
            "rope_parameters": {**BASE, "rope_type": "default", "partial_rotary_factor": 0.4},
        },
        {"rotary_base": 500.0, "rotary_percent": 0.4},
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_our_model_equals_a_class_of_transformers(name: str) -> None:
    settings, keys = PEERS[name]
    compare({**SIZES, "rms_norm_eps": 1e-6, **settings}, {**OURS, **keys})
