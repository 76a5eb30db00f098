"""Fact: with every kind of layer, logits of growing texts from the KV cache are those of the whole text, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron3d.inference.sampling import Sampler
from tests.unit.inference.test_sampling import CPU, MODELS, TOLERANCE, executor_of, whole_logits

PLAIN: dict[str, Any] = {"family": "llama", "num_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
LATENT = {**MODELS["latent"], "num_layers": 3}
WINDOWS: dict[str, Any] = {"window_size": (3, 0), "window_attn_skip_freq": 3}
KINDS: Mapping[str, dict[str, Any]] = {
    "learned positions, biases": {**PLAIN, "family": "gpt2"},
    "grouped queries, biases of queries, keys and values": {**PLAIN, "num_query_groups": 2, "add_qkv_bias": True},
    "sandwich norms, windows, two bases, scaled": {
        **PLAIN,
        **WINDOWS,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "embedding_scale": 5.0,
        "softmax_scale": 0.3,
        "rope_local_base_freq": 50.0,
    },
    "post-norms, norms of whole projections, clipped": {
        **PLAIN,
        "clip_qkv": 0.4,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    "no positions in every third layer, norms behind RoPE": {
        **PLAIN,
        "no_rope_freq": 3,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
        "attention_temperature_beta": 0.8,
        "attention_temperature_length": 3,
    },
    "no positions at all": {**PLAIN, "position_embedding_type": "none"},
    "part of a head, neighbours rotated, parallel residual": {
        **PLAIN,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "use_parallel_residual": True,
        "normalization": "LayerNorm",
        "activation": "xielu",
    },
    "sinks, windows, yarn, one norm for attention and MLP": {
        **PLAIN,
        **WINDOWS,
        "use_parallel_residual": True,
        "norm_placement": "shared",
        "normalization": "BiaslessLayerNorm",
        "softmax_type": "learnable",
        "activation": "clamped_swiglu",
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 6,
    },
    "caps": {**PLAIN, "attention_softcap": 1.0, "logit_softcap": 2.0, "window_size": (4, 0)},
    "output gate, logit scale": {**PLAIN, "attention_output_gate": True, "logit_scale": 0.5},
    "experts, shared ones, groups": {
        **PLAIN,
        "num_moe_experts": 4,
        "moe_layer_freq": (0, 1),
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_apply_probs_on_input": True,
        "qk_l2_norm": True,
        "no_rope_freq": 2,
    },
    "latents": LATENT,
    "latents, values larger than keys, queries without latent, interleaved": {
        **LATENT,
        "q_lora_rank": None,
        "v_head_dim": 15,
        "rotary_interleaved": True,
        "softmax_scale": 0.4,
    },
    "latents, a cap, sinks": {**LATENT, "attention_softcap": 0.7, "softmax_type": "off-by-one"},
    "latents, experts, biases, modules ahead": {
        **LATENT,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 12,
        "add_qkv_bias": True,
        "mtp_num_layers": 1,
    },
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_from_the_cache_are_those_of_the_whole_text(kind: str) -> None:
    executor = executor_of(KINDS[kind], {})
    sampler = Sampler(executor, CPU)
    for low, length in ((0, 2), (0, 3), (0, 7), (0, 8), (0, 10), (1, 6)):  # grows, then is another text
        contexts = [TEXT[low:length], TEXT[::-1][: length + 1]]
        wanted = torch.stack([whole_logits(executor, context) for context in contexts])
        got = sampler.next_logits(contexts)
        assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
