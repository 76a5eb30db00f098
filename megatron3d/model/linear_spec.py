"""The linears of a layer as one table: name, plan and global sizes; and the closed forms of parameters and FLOPs.

    attention.qkv   expand     hidden -> query heads and twice the key/value groups; the output gate where there is one
    attention.proj  contract   query heads -> hidden
    mlp.fc1         expand     hidden -> ffn, twice where a gate is fused
    mlp.fc2         contract   ffn -> hidden

Multi-head latent attention (`LatentAttention`) has three linears in place of qkv:

    attention.down  latent     hidden -> latents of queries and of keys and values, and the rotary key
    attention.q_up  expand     latent of queries, or hidden where there is none -> query heads
    attention.kv_up expand     latent of keys and values -> key heads and value heads

Shared experts are an MLP next to the experts.  Weights of experts are no linears of this table: rows of tokens are sent
to them (`model/experts.py`).  A module of multi-token prediction has two more, of the hidden state and of the embedding
of the next token: both expand hidden -> hidden.  `expand` is Megatron's column-parallel, `contract` its row-parallel
linear.

The parameter count is independent of the parameter table on purpose: at start-up the built model is checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.model.spec import GATED, Architecture, expert_layers, has_experts, keys_seen, layer_counts, mean_keys
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode

QKV, PROJ, FC1, FC2 = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.fc1", "mlp.shared_experts.fc2"
EXPERT_LINEARS = ("mlp.experts.fc1", "mlp.experts.fc2")
MTP_LINEARS = ("hidden_proj", "embedding_proj")
DOWN, Q_UP, KV_UP, GATE = ("attention.down", "attention.q_up", "attention.kv_up", "attention.gate_proj")
LINEARS = frozenset(
    (*(QKV, PROJ, FC1, FC2), *(DOWN, Q_UP, KV_UP, GATE), *(SHARED_FC1, SHARED_FC2), *EXPERT_LINEARS, *MTP_LINEARS)
)


def linear_of(path: str) -> str | None:
    """Return the linear, by its path in its layer or module, whose weight is the parameter at `path`; None: none."""
    name = path.split(".", 2)[-1].removeprefix("layer.").removesuffix(".weight")
    return name if name in LINEARS and path.endswith(".weight") else None


class LinearSize(NamedTuple):
    """Global sizes of one linear; `outputs` are those of the logical tensors that are fused in its weight."""

    expands: bool
    num_inputs: int
    outputs: Mapping[str, int]
    has_bias: bool = False
    to_latent: bool = False

    @property
    def num_outputs(self) -> int:
        """Return the output features of all fused parts."""
        return sum(self.outputs.values())

    @property
    def num_weights(self) -> int:
        """Return the elements of the weight."""
        return self.num_inputs * self.num_outputs

    def plan(self, mode: Mode) -> MatmulPlan:
        """Return the plan by which a tensor-parallel mode computes it."""
        if self.to_latent:
            return mode.latent
        return mode.expand if self.expands else mode.contract


def layer_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of a layer by their path in it, in the order of the forward pass."""
    if arch.is_latent:
        return _latent_linears(arch)
    queries, keys = arch.num_attention_heads * arch.kv_channels, arch.num_query_groups * arch.kv_channels
    sizes = linear_sizes(arch.hidden_size, arch.ffn_hidden_size, queries, keys, arch.activation in GATED)
    if arch.attention_output_gate:
        sizes[QKV] = sizes[QKV]._replace(outputs={**sizes[QKV].outputs, "gate": queries})
    biases = {QKV: arch.has_qkv_bias, PROJ: arch.add_bias_linear, FC1: arch.has_mlp_bias, FC2: arch.has_mlp_bias}
    return {name: size._replace(has_bias=biases[name]) for name, size in sizes.items()}


def _latent_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of a layer with multi-head latent attention; of its projections only `down` has biases."""
    heads, hidden, rank, latent = arch.num_attention_heads, arch.hidden_size, arch.q_lora_rank, arch.kv_lora_rank
    assert latent is not None, "keys and values have a latent"
    others = linear_sizes(hidden, arch.ffn_hidden_size, heads * arch.value_size, 0, arch.activation in GATED)
    biases = {PROJ: arch.add_bias_linear, FC1: arch.has_mlp_bias, FC2: arch.has_mlp_bias}
    down = {"kv_down": latent, "k_pos": arch.qk_pos_emb_head_dim}
    queries = {"q": heads * arch.key_size} if rank is None else {"q_up": heads * arch.key_size}
    keys = {"k_up": heads * arch.qk_head_dim, "v_up": heads * arch.value_size}
    gate = {GATE: LinearSize(True, hidden, {"gate": heads * arch.value_size})} if arch.attention_output_gate else {}
    return {
        DOWN: LinearSize(
            True, hidden, down if rank is None else {"q_down": rank, **down}, arch.has_qkv_bias, to_latent=True
        ),
        Q_UP: LinearSize(True, hidden if rank is None else rank, queries),
        KV_UP: LinearSize(True, latent, keys),
        **gate,
        **{name: others[name]._replace(has_bias=bias) for name, bias in biases.items()},
    }


def shared_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of the shared experts by their path in a layer with experts; none where it has none."""
    ffn = 0 if arch.experts is None else arch.experts.shared_ffn_hidden_size
    sizes = linear_sizes(arch.hidden_size, ffn, 1, 1, arch.activation in GATED)
    return {SHARED_FC1: sizes[FC1], SHARED_FC2: sizes[FC2]} if ffn else {}


def expert_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of one routed expert by their path in a layer with experts; none where there are none."""
    if arch.experts is None:
        return {}
    sizes = linear_sizes(arch.hidden_size, arch.experts.ffn_hidden_size, 1, 1, arch.activation in GATED)
    return dict(zip(EXPERT_LINEARS, (sizes[FC1], sizes[FC2]), strict=True))


def linears_of_layer(arch: Architecture, has_experts: bool) -> dict[str, LinearSize]:
    """Return the linears of a layer; in place of the MLP's those of shared experts, where it has experts."""
    linears = layer_linears(arch)
    if not has_experts:
        return linears
    return {name: size for name, size in linears.items() if name not in (FC1, FC2)} | shared_linears(arch)


def mtp_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears that a module of multi-token prediction has besides its layer, by their path in it."""
    return {name: LinearSize(True, arch.hidden_size, {name: arch.hidden_size}) for name in MTP_LINEARS}


def linears_of_model(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of the model by their path, those of experts and of multi-token prediction included."""
    layers = range(arch.num_layers)
    found = {f"layers.{layer}.{name}": size for layer in layers for name, size in _all_linears(arch, layer).items()}
    ahead = {**mtp_linears(arch), **_all_linears(arch, arch.num_layers - 1)}
    for depth in range(arch.mtp_num_layers):
        found |= {
            f"mtp.{depth}.{name if name in MTP_LINEARS else f'layer.{name}'}": size for name, size in ahead.items()
        }
    return found


def _all_linears(arch: Architecture, layer: int) -> dict[str, LinearSize]:
    """Return the linears of a layer, those of experts included."""
    chosen = has_experts(arch, layer)
    return linears_of_layer(arch, chosen) | (expert_linears(arch) if chosen else {})


def linear_size(arch: Architecture, name: str) -> LinearSize:
    """Return the sizes of a linear by its path in its layer or module."""
    return mtp_linears(arch)[name] if name in MTP_LINEARS else {**layer_linears(arch), **shared_linears(arch)}[name]


def linear_sizes(hidden: int, ffn: int, queries: int, keys: int, is_gated: bool) -> dict[str, LinearSize]:
    """Return the linears of a layer with `queries` features of all query heads and `keys` of all key heads."""
    up = {"gate": ffn, "up": ffn} if is_gated else {"up": ffn}
    return {
        QKV: LinearSize(True, hidden, {"q": queries, "k": keys, "v": keys}),
        PROJ: LinearSize(False, queries, {"proj": hidden}),
        FC1: LinearSize(True, hidden, up),
        FC2: LinearSize(False, ffn, {"fc2": hidden}),
    }


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
    mlp = gates * (h + mlp_bias) * f + f * h + mlp_bias * h + len(arch.activation_params)
    num_ahead = arch.mtp_num_layers
    num_experts = _num_mixtures(arch)
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


def num_active_parameters(arch: Architecture) -> int:
    """Return the number of parameters that a token passes: all but those of the experts that it does not choose."""
    idle = 0 if arch.experts is None else arch.experts.num_experts - arch.experts.topk
    return num_parameters(arch) - _num_mixtures(arch) * idle * _parameters_of_expert(arch)


def _num_mixtures(arch: Architecture) -> int:
    """Return the mixtures of experts of the model, those of multi-token prediction included."""
    return len(expert_layers(arch)) + arch.mtp_num_layers * has_experts(arch, arch.num_layers - 1)


def _expert_parameters(arch: Architecture) -> int:
    """Return the parameters of a mixture of experts: router, experts, shared experts and their gate."""
    experts, h = arch.experts, arch.hidden_size
    if experts is None:
        return 0
    shared = (3 if arch.activation in GATED else 2) * experts.shared_ffn_hidden_size + experts.has_shared_gate
    router = experts.num_experts * (h + experts.has_router_bias)
    return router + h * shared + experts.num_experts * _parameters_of_expert(arch)


def _parameters_of_expert(arch: Architecture) -> int:
    """Return the parameters of one expert; shared ones have no bias."""
    ffn, h = arch.experts.ffn_hidden_size if arch.experts else 0, arch.hidden_size
    matrices = 3 if arch.activation in GATED else 2
    return matrices * h * ffn + ((matrices - 1) * ffn + h) * arch.has_mlp_bias


def _latent_parameters(arch: Architecture) -> int:
    """Return the parameters of latent attention without the output projection's bias."""
    h, heads, c = arch.hidden_size, arch.num_attention_heads, arch.kv_lora_rank or 0
    queries, positions = arch.q_lora_rank or 0, arch.qk_pos_emb_head_dim
    norm = arch.num_norm_tensors
    down = (h + int(arch.has_qkv_bias)) * (queries + c + positions) + norm * (queries + c)
    keys, values = arch.qk_head_dim, arch.v_head_dim
    outputs = (1 + arch.attention_output_gate) * values * h
    return down + heads * ((queries or h) * (keys + positions) + c * (keys + values) + outputs)


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
