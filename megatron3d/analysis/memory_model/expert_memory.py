"""Memory of a mixture of experts on one rank, whose load is balanced or a multiple of that.

    kept        router's input and choice | rows of fc1 | activation | input of fc2 | rows that slots are added of
    transient   rows and their gradients of one step between the router and the combination

Small tensors (a number or a weight per token and expert) count roughly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.mlp_activations import KeptTensor, activation_tensors
from megatron3d.model.linears import SHARED_FC1, SHARED_FC2
from megatron3d.ops.router_spec import SEQUENCE, Experts, capacity_of
from megatron3d.parallel.modes.mode import ALLGATHER

# Bytes of an index.
INDEX = 8
ROUTER, FC1, ACTIVATION, FC2, COMBINE = (
    f"mlp.{name}" for name in ("router", "experts.fc1", "experts.activation", "experts.fc2", "experts.combine")
)
SHARED_ACTIVATION = SHARED_FC1.removesuffix("fc1") + "activation"
# Sites in the order of backward.
BACKWARD = (COMBINE, FC2, ACTIVATION, FC1, SHARED_FC2, SHARED_ACTIVATION, SHARED_FC1, ROUTER)


def expert_tensors(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield what a mixture of experts keeps for backward, the norm's output included."""
    combined = rows_combined(local, experts) * local.arch.hidden_size
    rows, hidden = local.expert_rows, local.arch.hidden_size
    moves = bool(local.mesh.nontrivial((*local.mode.residual[1], *local.mode.copies)))
    is_narrow, home = local.itemsize < local.wide, local.home_tokens * hidden
    if experts.shared_ffn_hidden_size or not (moves or is_narrow) or (experts.has_shared_gate and not moves):
        yield KeptTensor(ROUTER, "input of the layer", local.residual)
    if is_narrow:
        yield KeptTensor(ROUTER, "input and weight, widened", (home + experts.num_experts * hidden) * local.wide)
    if moves and (experts.has_shared_gate or not is_narrow):
        yield KeptTensor(ROUTER, "whole rows", home * local.itemsize)
    yield from _choice(local, experts)
    yield KeptTensor(FC1, "rows", rows * hidden * local.itemsize)
    yield from activation_tensors(local, rows * local.expert_ffn * local.itemsize, (FC1, FC2))
    yield KeptTensor(COMBINE, "rows of each slot", combined * local.itemsize)
    if experts.shared_ffn_hidden_size:
        yield from activation_tensors(local, local.inner(local.ffn), (SHARED_FC1, SHARED_FC2))
    if experts.has_shared_gate:
        yield KeptTensor(COMBINE, "output of shared experts", home * local.itemsize)


def _choice(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield the choice of experts, the order of rows, and what the losses of the router keep."""
    balance, scores = local.arch.balance, local.home_tokens * experts.num_experts * local.wide
    slots, ranks = local.gathered_tokens * experts.topk, local.mesh.size(local.mode.experts)
    yield KeptTensor(ROUTER, "choice", slots * INDEX)
    if local.mode.dispatcher == ALLGATHER and ranks > 1:
        yield KeptTensor(ROUTER, "weights of all ranks", ranks * slots * local.wide)
        yield KeptTensor(ROUTER, "order of rows", 2 * local.expert_rows * INDEX)
    else:
        reordered = ranks > 1 and experts.num_experts > ranks
        yield KeptTensor(ROUTER, "order of rows", 2 * slots * INDEX + 2 * reordered * local.expert_rows * INDEX)
    yield KeptTensor(ROUTER, "weights", slots * local.wide)
    if experts.score_function != "softmax" or experts.pre_softmax:
        yield KeptTensor(ROUTER, "scores", scores)
    if balance is not None and balance.loss == SEQUENCE:
        yield KeptTensor(ROUTER, "scores of the balance loss", 3 * scores)
    if balance is not None and balance.z_coeff:
        yield KeptTensor(ROUTER, "logits", scores)


def expert_peaks(local: LocalSizes, experts: Experts) -> Mapping[str, int]:
    """Return the transient bytes of each site of the backward: gradients of rows, and copies in another order."""
    row, inner = local.expert_rows * local.arch.hidden_size, local.expert_rows * local.expert_ffn
    ranks, parts = local.mesh.size(local.mode.experts), 2 if local.is_gated else 1
    one = local.arch.hidden_size * parts * local.expert_ffn * (local.itemsize < local.wide)
    gathered = local.gathered_tokens * local.arch.hidden_size * (ranks if _gathers(local) else local.etensor_ranks > 1)
    return {
        COMBINE: (gathered + 2 * max(row, rows_combined(local, experts) * local.arch.hidden_size)) * local.itemsize,
        FC2: (row + inner + one) * local.itemsize,
        ACTIVATION: (1 + parts) * inner * local.itemsize,
        FC1: (row + parts * inner + one) * local.itemsize,
        ROUTER: row * local.itemsize + _sum_bytes(local),
    }


def combination_peak(local: LocalSizes) -> int:
    """Return the transient bytes of the forward's end: the layer's input, the sum of slots, and rows that return.

    A forward that is recomputed follows the all-gather of its output's gradient.
    """
    is_exchanged = local.mesh.size(local.mode.experts) > 1 and not _gathers(local)
    tokens = local.gathered_tokens * local.mesh.size(local.mode.experts) if _gathers(local) else 0
    again = tokens * (local.recompute.granularity == "full")
    rows = again + is_exchanged * local.expert_rows
    return local.residual + _sum_bytes(local) + rows * local.arch.hidden_size * local.itemsize


def kept_choices(local: LocalSizes, layers: Iterable[int]) -> int:
    """Return the bytes of the choices of experts that recomputed layers keep."""
    kinds = ((each, count) for each, count in local.by_kind(layers) if each.experts is not None)
    has_capacity = local.arch.balance is not None and local.arch.balance.capacity_factor is not None
    choice = INDEX + has_capacity  # and whether its expert takes it
    return sum(count * each.home_tokens * each.experts.topk * choice for each, count in kinds if each.experts)


def rows_combined(local: LocalSizes, experts: Experts) -> int:
    """Return the rows that this rank adds: those of its experts, or those that return to its tokens."""
    return local.expert_rows if _gathers(local) else local.gathered_tokens * experts.topk


def worst_load(local: LocalSizes, experts: Experts) -> float:
    """Return the largest load of a rank: each token of its group chooses as many of its experts as it can.

    With a capacity its experts take no more than that of each sequence which the group has tokens of.
    """
    ranks, balance = local.mesh.size(local.mode.experts), local.arch.balance
    num_local = experts.num_experts // ranks
    worst = ranks * min(experts.topk, num_local) / experts.topk
    if balance is None or balance.capacity_factor is None:
        return worst
    group = {*local.mode.experts, *local.mode.etensor, *local.mode.batch_axes}
    parts = local.mesh.size(local.mesh.nontrivial(axis for axis in local.mode.home if axis not in group))
    taken = num_local * capacity_of(balance.capacity_factor, local.arch.seq_length, experts)
    return min(worst, ranks * parts * taken / (local.arch.seq_length * experts.topk))


def expected_load(local: LocalSizes, imbalance: float) -> float:
    """Return the load of the busiest rank that predictions assume: `imbalance`, or the largest that there can be."""
    return 1.0 if local.arch.experts is None else min(imbalance, worst_load(local, local.arch.experts))


def _gathers(local: LocalSizes) -> bool:
    """Return whether a rank has the tokens of all ranks of its expert group."""
    return local.mode.dispatcher == ALLGATHER and local.mesh.size(local.mode.experts) > 1


def _sum_bytes(local: LocalSizes) -> int:
    """Return the bytes of the sum of slots, wide and rounded, which `allgather` has for all ranks' tokens."""
    tokens = local.gathered_tokens * (local.mesh.size(local.mode.experts) if _gathers(local) else 1)
    return (
        tokens
        * local.arch.hidden_size
        * (local.wide + local.itemsize * (local.itemsize < local.wide or not _gathers(local)))
    )
