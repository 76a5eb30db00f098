"""Closed forms of the model's parameter count and floating-point operations.

The parameter count is independent of the parameter table on purpose: at start-up the built model is checked against it.
"""

from __future__ import annotations

from megatron3d.model.architecture import GATED, Architecture
from megatron3d.model.layer_kinds import expert_layers, has_experts, keys_seen, layer_counts, mean_keys
from megatron3d.model.linears import linears_of_layer, mtp_linears


def num_parameters(arch: Architecture) -> int:
    """Return the number of parameters of the whole model, without vocabulary padding."""
    h, f = arch.hidden_size, arch.ffn_hidden_size
    qkv_bias, proj_bias, mlp_bias = int(arch.has_qkv_bias), int(arch.add_bias_linear), int(arch.has_mlp_bias)
    norm = arch.num_norm_tensors
    q = arch.num_attention_heads * arch.kv_channels
    gate = q * arch.attention_output_gate
    kv = 2 * arch.num_query_groups * arch.kv_channels
    head_norms = 2 * arch.kv_channels if arch.qk_layernorm_scope == "head" else q + kv // 2
    attention = (h + qkv_bias) * (q + gate + kv) + q * h + proj_bias * h + head_norms * norm * arch.qk_layernorm
    if arch.is_latent:
        attention = _latent_parameters(arch) + proj_bias * h
    attention += arch.num_attention_heads * (arch.softmax_type == "learnable")
    gates = 2 if arch.activation in GATED else 1
    mlp = gates * (h + mlp_bias) * f + f * h + mlp_bias * h
    num_ahead = arch.mtp_num_layers
    num_experts = len(expert_layers(arch)) + num_ahead * has_experts(arch, arch.num_layers - 1)
    embeddings = arch.vocab_size * h * (1 if arch.tie_embeddings else 2)
    if arch.position_embedding_type == "learned_absolute":
        embeddings += arch.max_position_embeddings * h
    layers = arch.num_layers + num_ahead
    return (
        embeddings
        + layers * (attention + len(arch.norm_sites) * norm * h)
        + (layers - num_experts) * mlp
        + num_experts * _expert_parameters(arch)
        + norm * h
        + num_ahead * (2 * h * h + 3 * norm * h)
    )


def _expert_parameters(arch: Architecture) -> int:
    """Return the parameters of a mixture of experts: router, experts, shared experts and their gate."""
    experts, h = arch.experts, arch.hidden_size
    if experts is None:
        return 0
    matrices = 3 if arch.activation in GATED else 2
    ffn = experts.num_experts * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    biases = experts.num_experts * ((matrices - 1) * experts.ffn_hidden_size + h)  # shared experts have none
    router_bias = experts.num_experts * experts.has_router_bias
    return (
        h * (experts.num_experts + matrices * ffn + experts.has_shared_gate) + biases * arch.has_mlp_bias + router_bias
    )


def _latent_parameters(arch: Architecture) -> int:
    """Return the parameters of latent attention without the output projection's bias."""
    h, heads, c = arch.hidden_size, arch.num_attention_heads, arch.kv_lora_rank or 0
    queries, positions = arch.q_lora_rank or 0, arch.qk_pos_emb_head_dim
    norm = arch.num_norm_tensors
    down = (h + int(arch.has_qkv_bias)) * (queries + c + positions) + norm * (queries + c)
    keys, values = arch.qk_head_dim, arch.v_head_dim
    return down + heads * ((queries or h) * (keys + positions) + c * (keys + values) + values * h)


def layer_flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of one layer, forward and backward; where layers differ, their mean."""
    return 6 * layer_weights(arch) + _core_flops(arch)


def _core_flops(arch: Architecture) -> int:
    return round(6 * _score_width(arch) * mean_keys(arch))


def _score_width(arch: Architecture) -> int:
    """Return the channels that a score, and the value it weighs, take in all heads."""
    return arch.num_attention_heads * (arch.key_size + arch.value_size)


def flops_of_layer(arch: Architecture, layer: int) -> int:
    """Return the FLOPs per token of one layer of the model, forward and backward, with its own window and experts."""
    core = 6 * _score_width(arch) * keys_seen(arch, layer)
    return 6 * weights_of_layer(arch, layer) + core


def layer_weights(arch: Architecture) -> int:
    """Return the weights in a layer's GEMMs that compute a token; where layers differ, their mean."""
    return round(_all_layer_weights(arch) / arch.num_layers)


def _all_layer_weights(arch: Architecture) -> int:
    counts = layer_counts(arch, range(arch.num_layers))
    return sum(count * weights_of_layer(arch, place) for place, count in counts.items())


def weights_of_layer(arch: Architecture, layer: int) -> int:
    """Return the weights in the GEMMs of a layer that compute a token: of experts those that are chosen."""
    chosen = has_experts(arch, layer)
    linears = sum(linear.num_weights for linear in linears_of_layer(arch, chosen).values())
    return linears + (_routed_weights(arch) if chosen else 0)


def _routed_weights(arch: Architecture) -> int:
    """Return the weights of a mixture of experts that compute a token: the router's and those of chosen experts."""
    experts, matrices = arch.experts, 3 if arch.activation in GATED else 2
    if experts is None:
        return 0
    ffn = experts.topk * experts.ffn_hidden_size
    return arch.hidden_size * (experts.num_experts + experts.has_shared_gate + matrices * ffn)


def mtp_flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of multi-token prediction: of each module two linears, a layer, and the LM head."""
    linears = 6 * sum(linear.num_weights for linear in mtp_linears(arch).values())
    return arch.mtp_num_layers * (linears + flops_of_layer(arch, arch.num_layers - 1) + head_flops_per_token(arch))


def head_flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of the LM head, forward and backward."""
    return 6 * arch.hidden_size * arch.vocab_size


def flops_per_token(arch: Architecture) -> int:
    """Return the FLOPs per token of the model, forward and backward (Chowdhery et al. 2022, arXiv:2204.02311, B).

    They are 6 per weight of a GEMM, LM head included and embeddings excluded, plus 12 * layers * heads * head size *
    length for core attention, whose masked half is counted, as is customary for MFU; a window takes the length's place.
    """
    layers = 6 * _all_layer_weights(arch) + arch.num_layers * _core_flops(arch)
    return layers + head_flops_per_token(arch) + mtp_flops_per_token(arch)
