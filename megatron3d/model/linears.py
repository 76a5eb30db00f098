"""The four linears of a transformer layer as one table: name, plan, and global sizes.

    attention.qkv   expand     hidden -> query heads and twice the key/value groups; the output gate where there is one
    attention.proj  contract   query heads -> hidden
    mlp.fc1         expand     hidden -> ffn, twice where a gate is fused
    mlp.fc2         contract   ffn -> hidden

Shared experts are an MLP next to the experts.  Weights of experts are no linears of this table: rows of tokens are sent
to them (`model/experts.py`).
`expand` is Megatron's column-parallel, `contract` its row-parallel linear.
A module of multi-token prediction has two
more, of the hidden state and of the embedding of the next token: both expand hidden -> hidden.
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


class LinearSize(NamedTuple):
    """Global sizes of one linear; `outputs` are those of the logical tensors that are fused in its weight."""

    expands: bool
    num_inputs: int
    outputs: Mapping[str, int]
    has_bias: bool = False

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
        return mode.expand if self.expands else mode.contract


def layer_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of a layer by their path in it, in the order of the forward pass."""
    queries, keys = arch.num_attention_heads * arch.kv_channels, arch.num_query_groups * arch.kv_channels
    sizes = linear_sizes(arch.hidden_size, arch.ffn_hidden_size, queries, keys, arch.activation in GATED)
    if arch.attention_output_gate:
        sizes[QKV] = sizes[QKV]._replace(outputs={**sizes[QKV].outputs, "gate": queries})
    biases = {QKV: arch.has_qkv_bias, PROJ: arch.add_bias_linear, FC1: arch.has_mlp_bias, FC2: arch.has_mlp_bias}
    return {name: size._replace(has_bias=biases[name]) for name, size in sizes.items()}


def shared_linears(arch: Architecture) -> dict[str, LinearSize]:
    """Return the linears of the shared experts by their path in a layer with experts; none where it has none."""
    ffn = 0 if arch.experts is None else arch.experts.shared_ffn_hidden_size
    sizes = linear_sizes(arch.hidden_size, ffn, 1, 1, arch.activation in GATED)
    return {SHARED_FC1: sizes[FC1], SHARED_FC2: sizes[FC2]} if ffn else {}


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
