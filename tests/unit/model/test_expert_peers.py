"""Fact: with the same weights our mixture of experts computes what classes of transformers do, gradients included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.support.peers import LLAMA_NAMES, compare

NUM_EXPERTS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "hidden_size": 24,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}
OURS: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 64,
    "hidden_size": 24,
    "ffn_hidden_size": 14,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "norm_epsilon": 1e-6,
    "rotary_base": 500.0,
    "num_moe_experts": NUM_EXPERTS,
    "moe_router_topk": 2,
}
MOE = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
# Class of transformers with its settings, and our keys.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"model_type": "mixtral", "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}, {}),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", **MOE, "norm_topk_prob": True, "mlp_only_layers": [0]},
        {"qk_layernorm": True, "moe_ffn_hidden_size": 10, "moe_layer_freq": [0, 1]},
    ),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": NUM_EXPERTS, "num_experts_per_tok": 3},
        {
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
            "moe_router_pre_softmax": True,
            "moe_router_topk": 3,
        },
    ),
    "qwen2_moe": (
        {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
        {
            "add_qkv_bias": True,
            "moe_ffn_hidden_size": 10,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": 12,
            "moe_shared_expert_gate": True,
        },
    ),
    "glm4_moe": (
        {
            "model_type": "glm4_moe",
            "n_routed_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
        {
            "rotary_percent": 0.5,
            "moe_ffn_hidden_size": 10,
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 20,
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 3,
            "moe_router_enable_expert_bias": True,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 1.5,
        },
    ),
}


def by_expert(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors with those of all experts split by expert and by projection."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
        elif leaf == "down_proj":
            found |= {f"{prefix}.{expert}.down_proj.weight": each for expert, each in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def names(shared: str) -> Mapping[str, str]:
    """Return the names of a layer's modules, with those of shared experts at `shared`."""
    ours, theirs = "layers.{n}.mlp.", "model.layers.{n}.mlp."
    kinds = {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}
    found = {f"{ours}router.expert_bias": f"{theirs}gate.e_score_correction_bias"}
    found |= {f"{ours}router": f"{theirs}gate", f"{ours}shared_gate": f"{theirs}shared_expert_gate"}
    for kind, module in kinds.items():
        found |= {f"{ours}experts.{e}.{kind}": f"{theirs}experts.{e}.{module}" for e in range(NUM_EXPERTS)}
        found[f"{ours}shared_experts.{kind}"] = f"{theirs}{shared}.{module}"
    return {**LLAMA_NAMES, **found}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_of_transformers(family: str) -> None:
    settings, keys = FAMILIES[family]
    shared = "shared_expert" if family == "qwen2_moe" else "shared_experts"
    compare({**SIZES, **settings}, {**OURS, **keys}, names(shared), by_expert)
