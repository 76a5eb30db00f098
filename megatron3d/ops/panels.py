"""Operands that arrive panel by panel, and results that leave so: what a `Sweep` means for tensors.

    panel j of an operand: gathered from slice j of every shard      under the product of panel j - 1
    panel j of a result:   reduced into slice j of every shard       under the product of panel j + 1

A tensor without the sweep's dimension has one panel: such an operand is brought once and used by all products, such a
result is the sum of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron3d.comm.process_comm import Comm, Pending
from megatron3d.ops.collectives import W_DIMS, gather, reduce
from megatron3d.ops.gemm import add_product, product
from megatron3d.ops.main_grad import SinkResult, sink_of
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves
from megatron3d.parallel.panel_plan import Sweep, stored_over

Table = Mapping[str, str]
Dims = Mapping[str, int]


class Operand(Protocol):
    """What is multiplied; panels are begun, and then taken, in order."""

    def begin(self, panel: int) -> None:
        """Begin to bring a panel, if there is one."""
        ...

    def take(self, panel: int) -> Tensor:
        """A panel that was begun."""
        ...


class WholeOperand:
    """One that every product needs as a whole; it is given up with the last."""

    def __init__(self, arriving: Pending, num_uses: int) -> None:
        self._arriving: Pending | None = arriving
        self._here: Tensor | None = None
        self._last = num_uses - 1

    def begin(self, panel: int) -> None: ...

    def take(self, panel: int) -> Tensor:
        if self._arriving is not None:
            self._here, self._arriving = self._arriving.wait(), None
        here = self._here
        assert here is not None, f"panel {panel} is taken after the last"
        self._here = None if panel == self._last else here
        return here


class CutOperand:
    """One that the sweep cuts; `shard` is what the table says is stored."""

    def __init__(self, shard: Tensor, table: Table, dims: Dims, comm: Comm, sweep: Sweep) -> None:
        self._shard, self._table, self._dims, self._comm, self._slices = shard, table, dims, comm, sweep.slices
        self._dim = dims[sweep.dim]
        self._num_cells = sweep.cells // comm.mesh.size(stored_over(table, sweep.dim))
        self._arriving: dict[int, Pending] = {}

    def begin(self, panel: int) -> None:
        if panel < len(self._slices) and panel not in self._arriving:
            mine = _slice(self._shard, self._dim, self._num_cells, self._slices[panel]).flatten(
                self._dim, self._dim + 1
            )
            self._arriving[panel] = gather(mine, self._table, self._dims, self._comm)

    def take(self, panel: int) -> Tensor:
        return self._arriving.pop(panel).wait()


def operand(shard: Tensor, table: Table, dims: Dims, comm: Comm, sweep: Sweep) -> Operand:
    """A stored operand whose first panel is on its way."""
    if sweep.dim not in dims:
        return WholeOperand(gather(shard, table, dims, comm), sweep.num_panels)
    found = CutOperand(shard, table, dims, comm, sweep)
    found.begin(0)
    return found


def begin(panel: int, *operands: Operand | None) -> None:
    """Begin to bring a panel of each."""
    for each in operands:
        if each is not None:
            each.begin(panel)


class Result:
    """A product's result, reduced by `steps` into what the table says is stored.

    With `overlap` a reduction is waited for after the next product, else at once.
    """

    def __init__(
        self, steps: tuple[Move, ...], table: Table, dims: Dims, comm: Comm, sweep: Sweep, overlap: bool = True
    ) -> None:
        self._steps, self._dims, self._comm, self._sweep = steps, dims, comm, sweep
        self._is_cut, self._overlap = sweep.dim in dims, overlap and bool(steps)
        self._num_cells = sweep.cells // comm.mesh.size(stored_over(table, sweep.dim))
        self._sum: Tensor | None = None
        self._leaving: tuple[int, Pending] | None = None
        self._out: Tensor | None = None

    def multiply(self, panel: int, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        """Take a b^T + bias as a panel of the result, or as a part of its sum."""
        if self._is_cut:
            self._reduce(panel, product(a, b, bias))
            return
        self._sum = product(a, b, bias) if self._sum is None else add_product(self._sum, a, b)
        if panel == self._sweep.num_panels - 1:
            total, self._sum = self._sum.to(a.dtype), None
            self._reduce(panel, total)

    def _reduce(self, panel: int, partial: Tensor) -> None:
        leaving = reduce(partial, self._steps, self._dims, self._comm)
        del partial
        self._place()
        self._leaving = panel, leaving
        if not self._overlap:
            self._place()

    def _place(self) -> None:
        """Wait for the panel that is leaving, and put it where it belongs."""
        if self._leaving is None:
            return
        (panel, leaving), self._leaving = self._leaving, None
        piece = leaving.wait()
        if not self._is_cut or self._sweep.num_panels == 1:
            self._out = piece
            return
        dim, cells, slices = self._dims[self._sweep.dim], self._num_cells, self._sweep.slices
        if self._out is None:
            shape = list(piece.shape)
            shape[dim] = cells * sum(slices[-1])
            self._out = piece.new_empty(shape)
        _slice(self._out, dim, cells, slices[panel]).copy_(piece.unflatten(dim, (cells, -1)))

    def finish(self) -> Pending:
        """The whole result; `wait` waits for the last panel."""

        def finish() -> Tensor:
            self._place()
            assert self._out is not None, "nothing was multiplied"
            return self._out

        return Pending(finish)


WeightResult = Result | SinkResult


def weight_result(leaf: Tensor, plan: MatmulPlan, comm: Comm, sweep: Sweep) -> WeightResult:
    """dW on its way to be reduced; or, if it is not reduced nor cut, straight to where the leaf sums its gradients."""
    sink, is_cut = sink_of(leaf), sweep.num_panels > 1 and sweep.dim in W_DIMS
    if sink is None or is_cut or plan.w:
        return Result(moves(plan.w), plan.w, W_DIMS, comm, sweep)
    return SinkResult(sink)


def _slice(t: Tensor, dim: int, num_cells: int, part: tuple[int, int]) -> Tensor:
    """The same slice (start, length) of each of so many equal cells along a dimension, which becomes two."""
    cells: Tensor = t.unflatten(dim, (num_cells, -1))
    return cells.narrow(dim + 1, *part)
