"""All-gathers of a planned matmul's operands and reductions of its partial sums, as the plan's tables say.

W of one linear is prefetched: all-gathered during the GEMMs of its neighbour (OAG of Singh et al. 2024,
arXiv:2305.13525, section 5).

    forward    all-gather W of the next linear     during this linear's GEMM
    backward   all-gather W of the previous linear during this linear's dgrad and wgrad GEMMs

Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.linear.gemm import Operand
from megatron3d.linear.overlap_plan import Direction, TPOverlap
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves

X_DIMS, W_DIMS = {"M": 0, "K": 1}, {"N": 0, "K": 1}
Y_DIMS = {"M": 0, "N": 1}


def gather(t: Tensor, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Start to all-gather the dims that the table says are sharded further; the last sharded first."""
    steps = moves(table)[::-1]
    if not steps:
        return completed(t)
    pending = comm.all_gather(t, steps[0].axes, dims[str(steps[0].dim)])

    def finish() -> Tensor:
        out = pending.wait()
        for axes, dim in steps[1:]:
            out = comm.all_gather(out, axes, dims[str(dim)]).wait()
        return out

    return Pending(finish)


def gather_operand(operand: Operand, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending[Operand]:
    """Start to all-gather an operand of a GEMM, its data and then its scales, along the same dims.

    Scales of blocks that have all of a dim are the same on all ranks along it.
    """
    if not table:
        return completed(operand)
    form = operand.form
    if form is not None and form.is_transposed:
        dims = {name: 1 - dim for name, dim in dims.items()}
    data = _gather_bytes(operand.data, table, dims, comm)
    if operand.scales is None:
        return Pending(lambda: Operand(data.wait(), form=form))
    whole = () if form is None else [dim for dim, size in enumerate((form.rows, form.summed)) if size is None]
    varying = {axis: name for axis, name in table.items() if dims[name] not in whole}
    scales = _gather_bytes(operand.scales, varying, dims, comm)
    return Pending(lambda: Operand(data.wait(), scales.wait(), form))


def _gather_bytes(t: Tensor, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Start to all-gather a tensor; one of single bytes as such, since not every backend knows the formats of fp8."""
    if t.dtype.itemsize > 1:
        return gather(t, table, dims, comm)
    pending = gather(t.view(torch.uint8), table, dims, comm)
    return Pending(lambda: pending.wait().view(t.dtype))


def reduce(t: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Start to reduce partial sums: reduce-scatter where a step names a dim, else all-reduce."""
    if not steps:
        return completed(t)

    def begin(t: Tensor, step: Move) -> Pending:
        return comm.reduce_scatter(t, step.axes, dims[step.dim]) if step.dim else comm.all_reduce(t, step.axes)

    pending = begin(t, steps[0])

    def finish() -> Tensor:
        out = pending.wait()
        for step in steps[1:]:
            out = begin(out, step).wait()
        return out

    return Pending(finish)


def gather_dy(dy_MN: Tensor, plan: MatmulPlan, comm: Comm) -> Pending:
    """Start to all-gather dY over the axes that Y was scattered over."""
    return gather(dy_MN, plan.dy, Y_DIMS, comm)


class PrefetchedWeight:
    """W of one linear from the start of its all-gather to its last use.

    Args:
        shard: returns the stored shard of W, as an operand of the linear's GEMM in forward or backward.
    """

    def __init__(self, shard: Callable[[Direction], Operand], plan: MatmulPlan, comm: Comm, overlap: TPOverlap) -> None:
        self._shard, self._table = shard, plan.w
        self._comm, self._keeps = comm, overlap.keep_gathered_weights
        self._neighbours: dict[Direction, tuple[PrefetchedWeight, Callable[[], None]]] = {}
        self._in_flight: Pending[Operand] | None = None
        self._kept: Operand | None = None
        self._num_backwards = 0

    def gather(self, at: Direction, backward_follows: bool = False) -> Pending[Operand]:
        """Return the gathered W, which may be in flight already, and start to prefetch the neighbour's."""
        w = self._take(at, backward_follows) or self._all_gather(at)
        self._prefetch_neighbour(at)
        return w

    def set_neighbour(self, at: Direction, weight: PrefetchedWeight, unshard: Callable[[], None]) -> None:
        """Prefetch `weight` during this linear's GEMMs, after `unshard` has all-gathered its FSDP unit."""
        self._neighbours[at] = weight, unshard

    def prefetch(self, at: Direction, unshard: Callable[[], None]) -> None:
        """Start to gather W unless it is in flight or kept."""
        if self._in_flight is None and self._kept is None:
            unshard()
            self._in_flight = self._all_gather(at)

    def drop(self) -> None:
        """Drop the gathered W, since the weights have changed."""
        self._in_flight, self._kept = None, None
        self._num_backwards = 0

    def _take(self, at: Direction, backward_follows: bool) -> Pending[Operand] | None:
        """Return W if it is kept, in flight, or to be kept for the backward that follows."""
        keeps = self._keeps and backward_follows and not _in_backward()
        w, self._in_flight = self._in_flight, None
        if self._kept is not None:
            w = completed(self._kept)
        elif keeps:
            gathered = w or self._all_gather(at)
            w = Pending(lambda: self._keep(gathered.wait()))
        self._num_backwards += keeps
        if at is Direction.BACKWARD and self._kept is not None:
            self._num_backwards -= 1
            self._kept = self._kept if self._num_backwards else None
        return w

    def _keep(self, w: Operand) -> Operand:
        self._kept = w
        return w

    def _all_gather(self, at: Direction) -> Pending[Operand]:
        return gather_operand(self._shard(at), self._table, W_DIMS, self._comm)

    def _prefetch_neighbour(self, at: Direction) -> None:
        """Prefetch the neighbour's W, except when backward recomputes a forward: no further forward follows it."""
        if at in self._neighbours and not (at is Direction.FORWARD and _in_backward()):
            weight, unshard = self._neighbours[at]
            weight.prefetch(at, unshard)


def prefetch_in_order(weights: Sequence[tuple[PrefetchedWeight, Callable[[], None]]]) -> None:
    """Set the neighbours that prefetch each weight; `weights` are in forward order, each with its `unshard`."""
    for (weight, _), following in pairwise(weights):
        weight.set_neighbour(Direction.FORWARD, *following)
    for preceding, (weight, _) in pairwise(weights):
        weight.set_neighbour(Direction.BACKWARD, *preceding)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
