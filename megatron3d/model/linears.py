"""The linears of a transformer layer as one table: name, plan, and global sizes.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.model.architecture import GATED, Architecture
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode

QKV, PROJ, FC1, FC2 = LINEARS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.fc1", "mlp.shared_experts.fc2"
MTP_LINEARS = ("hidden_proj", "embedding_proj")
DOWN, Q_UP, KV_UP = ("attention.down", "attention.q_up", "attention.kv_up")


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
    return {
        DOWN: LinearSize(
            True, hidden, down if rank is None else {"q_down": rank, **down}, arch.has_qkv_bias, to_latent=True
        ),
        Q_UP: LinearSize(True, hidden if rank is None else rank, queries),
        KV_UP: LinearSize(True, latent, keys),
        **{name: others[name]._replace(has_bias=bias) for name, bias in biases.items()},
    }


def shared_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of the shared experts by their path in a layer with experts; none where it has none."""
    ffn = 0 if arch.experts is None else arch.experts.shared_ffn_hidden_size
    sizes = linear_sizes(arch.hidden_size, ffn, 1, 1, arch.activation in GATED)
    return {SHARED_FC1: sizes[FC1], SHARED_FC2: sizes[FC2]} if ffn else {}


def linears_of_layer(arch: Architecture, has_experts: bool) -> dict[str, LinearSize]:
    """Return the linears of a layer; in place of the MLP's those of shared experts, where it has experts."""
    linears = layer_linears(arch)
    if not has_experts:
        return linears
    return {name: size for name, size in linears.items() if name not in (FC1, FC2)} | shared_linears(arch)


def mtp_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears that a module of multi-token prediction has besides its layer, by their path in it."""
    return {name: LinearSize(True, arch.hidden_size, {name: arch.hidden_size}) for name in MTP_LINEARS}


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
