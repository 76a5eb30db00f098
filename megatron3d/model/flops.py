"""Closed forms of the model's parameter count and floating-point operations.

The parameter count is independent of the parameter table on purpose: at start-up the built model is checked against it.
"""

from __future__ import annotations

from megatron3d.model.architecture import GATED, Architecture
from megatron3d.model.layer_kinds import keys_seen, mean_keys
from megatron3d.model.linears import layer_linears


def num_parameters(arch: Architecture) -> int:
    """Return the number of parameters of the whole model, without vocabulary padding."""
    h, f = arch.hidden_size, arch.ffn_hidden_size
    qkv_bias, proj_bias, mlp_bias = int(arch.has_qkv_bias), int(arch.add_bias_linear), int(arch.has_mlp_bias)
    norm = 2 if arch.normalization == "LayerNorm" else 1
    q = arch.num_attention_heads * arch.kv_channels
    gate = q * arch.attention_output_gate
    kv = 2 * arch.num_query_groups * arch.kv_channels
    head_norms = 2 * arch.kv_channels if arch.qk_layernorm_scope == "head" else q + kv // 2
    attention = (h + qkv_bias) * (q + gate + kv) + q * h + proj_bias * h + head_norms * norm * arch.qk_layernorm
    attention += arch.num_attention_heads * (arch.softmax_type == "learnable")
    gates = 2 if arch.activation in GATED else 1
    mlp = gates * (h + mlp_bias) * f + f * h + mlp_bias * h
    embeddings = arch.vocab_size * h * (1 if arch.tie_embeddings else 2)
    if arch.position_embedding_type == "learned_absolute":
        embeddings += arch.max_position_embeddings * h
    return embeddings + arch.num_layers * (attention + mlp + len(arch.norm_sites) * norm * h) + norm * h


def layer_flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of one layer, forward and backward; where windows differ, their mean."""
    return 6 * layer_weights(arch) + round(12 * arch.num_attention_heads * arch.kv_channels * mean_keys(arch))


def flops_of_layer(arch: Architecture, layer: int) -> int:
    """Return the FLOPs per token of one layer of the model, forward and backward, with its own window."""
    return 6 * layer_weights(arch) + 12 * arch.num_attention_heads * arch.kv_channels * keys_seen(arch, layer)


def layer_weights(arch: Architecture) -> int:
    """Return the number of weights in a layer's GEMMs."""
    return sum(linear.num_weights for linear in layer_linears(arch).values())


def head_flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of the LM head, forward and backward."""
    return 6 * arch.hidden_size * arch.vocab_size


def flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of the model, forward and backward (Chowdhery et al. 2022, arXiv:2204.02311, B).

    They are 6 per weight of a GEMM, LM head included and embeddings excluded, plus 12 * layers * heads * head size *
    length for core attention, whose masked half is counted, as is customary for MFU; a window takes the length's place.
    """
    return arch.num_layers * layer_flops_per_token(arch) + head_flops_per_token(arch)
