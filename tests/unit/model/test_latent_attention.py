"""Fact: with the same weights latent attention computes what transformers' DeepSeek-V2 and V3 with dense layers do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.support.peers import LLAMA_NAMES, compare

HEADS, PLAIN, ROTATED, VALUES, LATENT = 6, 6, 4, 7, 6
ROPE = {"rope_theta": 500.0, "rope_type": "default"}
SIZES = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "hidden_size": 18,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 8,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUES,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "rope_parameters": ROPE,
}
OURS = {
    "family": "llama",
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 64,
    "hidden_size": 18,
    "ffn_hidden_size": 14,
    "num_layers": 3,
    "num_attention_heads": HEADS,
    "norm_epsilon": 1e-6,
    "rotary_base": 500.0,
    "rotary_interleaved": True,
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": LATENT,
    "qk_head_dim": PLAIN,
    "qk_pos_emb_head_dim": ROTATED,
    "v_head_dim": VALUES,
}
ATTENTION = "model.layers.{n}.self_attn"
NAMES = {
    **LLAMA_NAMES,
    "layers.{n}.attention.q_down": f"{ATTENTION}.q_a_proj",
    "layers.{n}.attention.q_norm": f"{ATTENTION}.q_a_layernorm",
    "layers.{n}.attention.q_up": f"{ATTENTION}.q_b_proj",
    "layers.{n}.attention.kv_down": f"{ATTENTION}.kv_down",
    "layers.{n}.attention.k_pos": f"{ATTENTION}.k_pos",
    "layers.{n}.attention.kv_norm": f"{ATTENTION}.kv_a_layernorm",
    "layers.{n}.attention.k_up": f"{ATTENTION}.k_up",
    "layers.{n}.attention.v_up": f"{ATTENTION}.v_up",
}
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 4.0, "original_max_position_embeddings": 16}
OUR_YARN = {
    "rotary_scaling": "yarn",
    "rotary_scaling_factor": 40.0,
    "rotary_beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}


def mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


# Settings of transformers besides `SIZES`, and our keys besides `OURS`.
PEERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "V3": ({"model_type": "deepseek_v3"}, {}),
    "V3, queries without latent": ({"model_type": "deepseek_v3", "q_lora_rank": None}, {"q_lora_rank": None}),
    "V3, biases": (
        {"model_type": "deepseek_v3", "attention_bias": True},
        {"add_bias_linear": True, "add_qkv_bias": True, "add_mlp_bias": False},
    ),
    "V3, halves": ({"model_type": "deepseek_v3", "rope_interleave": False}, {"rotary_interleaved": False}),
    "V3, values larger than keys": ({"model_type": "deepseek_v3", "v_head_dim": 12}, {"v_head_dim": 12}),
    "V3, yarn": (
        {"model_type": "deepseek_v3", "rope_parameters": {**ROPE, **YARN, "mscale": 0.7, "mscale_all_dim": 1.1}},
        {
            **OUR_YARN,
            "rotary_attention_factor": mscale(40.0, 0.7) / mscale(40.0, 1.1),
            "softmax_scale": (PLAIN + ROTATED) ** -0.5 * mscale(40.0, 1.1) ** 2,
        },
    ),
    "V2": ({"model_type": "deepseek_v2"}, {}),
}


def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of the latent and the rotary key, and of keys and values, apart."""
    found = dict(tensors)
    for name in tensors:
        if "kv_a_proj_with_mqa" in name:
            latent, key = tensors[name].split((LATENT, ROTATED))
            found |= {name.replace("kv_a_proj_with_mqa", "kv_down"): latent}
            found |= {name.replace("kv_a_proj_with_mqa", "k_pos"): key}
            del found[name]
        if "kv_b_proj" in name:
            rows = tensors[name].unflatten(0, (HEADS, -1))
            found |= {name.replace("kv_b_proj", "k_up"): rows[:, :PLAIN].flatten(0, 1)}
            found |= {name.replace("kv_b_proj", "v_up"): rows[:, PLAIN:].flatten(0, 1)}
            del found[name]
    return found


@pytest.mark.parametrize("name", PEERS)
def test_latent_attention_equals_a_class_of_transformers(name: str) -> None:
    settings, keys = PEERS[name]
    direct = {"layers.{n}.attention.q": f"{ATTENTION}.q_proj"}
    compare({**SIZES, **settings}, {**OURS, **keys}, {**NAMES, **direct}, split)
