"""Operands that are gathered, and results that are reduced, panel by panel as a `PanelPlan` says.

A tensor without the panels' dimension has one panel: such an operand is gathered once and used by all GEMMs, and such a
result is the sum over all GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.collectives import gather, reduce
from megatron3d.linear.gemm import add_product, product, product_in
from megatron3d.parallel.matmul_plan import Move
from megatron3d.parallel.panel_plan import PanelPlan, stored_over

Table = Mapping[str, str]
Dims = Mapping[str, int]


class Operand(Protocol):
    """Operand of a GEMM; panels are started, and then taken, in order."""

    def start(self, panel: int) -> None:
        """Start to gather a panel, if there is one."""
        ...

    def take(self, panel: int) -> Tensor:
        """Wait for a started panel and return it."""
        ...


class WholeOperand:
    """Operand that every GEMM needs whole; it is freed after the last GEMM."""

    def __init__(self, pending: Pending, num_uses: int) -> None:
        self._in_flight: Pending | None = pending
        self._gathered: Tensor | None = None
        self._last = num_uses - 1

    def start(self, panel: int) -> None: ...

    def take(self, panel: int) -> Tensor:
        if self._in_flight is not None:
            self._gathered, self._in_flight = self._in_flight.wait(), None
        gathered = self._gathered
        assert gathered is not None, f"panel {panel} is taken after the last"
        self._gathered = None if panel == self._last else gathered
        return gathered


class SlicedOperand:
    """Operand that the panels slice; `shard` is stored as the table says."""

    def __init__(self, shard: Tensor, table: Table, dims: Dims, comm: Comm, panels: PanelPlan) -> None:
        self._shard, self._table = shard, table
        self._dims, self._comm = dims, comm
        self._slices = panels.slices
        self._dim = dims[panels.dim]
        self._num_cells = panels.cells // comm.mesh.size(stored_over(table, panels.dim))
        self._in_flight: dict[int, Pending] = {}

    def start(self, panel: int) -> None:
        if panel < len(self._slices) and panel not in self._in_flight:
            mine = _slice(self._shard, self._dim, self._num_cells, self._slices[panel]).flatten(
                self._dim, self._dim + 1
            )
            self._in_flight[panel] = gather(mine, self._table, self._dims, self._comm)

    def take(self, panel: int) -> Tensor:
        return self._in_flight.pop(panel).wait()


def operand(shard: Tensor, table: Table, dims: Dims, comm: Comm, panels: PanelPlan) -> Operand:
    """Return a stored operand with its first panel in flight."""
    if panels.dim not in dims:
        return WholeOperand(gather(shard, table, dims, comm), panels.num_panels)
    found = SlicedOperand(shard, table, dims, comm, panels)
    found.start(0)
    return found


def start_panel(panel: int, *operands: Operand | None) -> None:
    """Start to gather a panel of each operand."""
    for each in operands:
        if each is not None:
            each.start(panel)


class Result:
    """Result of the GEMMs, reduced by `steps` into the layout that the table says.

    With `overlap` a panel's reduction is waited for after the next GEMM, else at once.
    """

    def __init__(
        self,
        steps: tuple[Move, ...],
        table: Table,
        dims: Dims,
        comm: Comm,
        panels: PanelPlan,
        overlap: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self._steps, self._dims = steps, dims
        self._comm, self._panels = comm, panels
        self._is_sliced, self._overlap = panels.dim in dims, overlap and bool(steps)
        self._num_cells = panels.cells // comm.mesh.size(stored_over(table, panels.dim))
        self._sum: Tensor | None = None
        self._in_flight: tuple[int, Pending] | None = None
        self._out: Tensor | None = None

    def multiply(self, panel: int, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        """Compute a [M, K] b [N, K]^T + bias [N] as a panel of the result, or as a term of its sum."""
        if self._is_sliced:
            self._reduce(panel, product(a, b, bias) if self._dtype is None else product_in(self._dtype, a, b))
            return
        self._sum = product(a, b, bias) if self._sum is None else add_product(self._sum, a, b)
        if panel == self._panels.num_panels - 1:
            total, self._sum = self._sum.to(a.dtype), None
            self._reduce(panel, total)

    def _reduce(self, panel: int, partial: Tensor) -> None:
        pending = reduce(partial, self._steps, self._dims, self._comm)
        del partial
        self._store()
        self._in_flight = panel, pending
        if not self._overlap:
            self._store()

    def _store(self) -> None:
        """Wait for the panel in flight and copy it to its place."""
        if self._in_flight is None:
            return
        (panel, pending), self._in_flight = self._in_flight, None
        piece = pending.wait()
        if not self._is_sliced or self._panels.num_panels == 1:
            self._out = piece
            return
        dim, cells = self._dims[self._panels.dim], self._num_cells
        slices = self._panels.slices
        if self._out is None:
            shape = list(piece.shape)
            shape[dim] = cells * sum(slices[-1])
            self._out = piece.new_empty(shape)
        _slice(self._out, dim, cells, slices[panel]).copy_(piece.unflatten(dim, (cells, -1)))

    def finish(self) -> Pending:
        """Return the whole result; `wait` waits for the last panel."""

        def finish() -> Tensor:
            self._store()
            assert self._out is not None, "nothing was multiplied"
            return self._out

        return Pending(finish)


def _slice(t: Tensor, dim: int, num_cells: int, part: tuple[int, int]) -> Tensor:
    """Return the same slice (start, length) of each of `num_cells` equal cells along a dimension, which becomes two."""
    cells: Tensor = t.unflatten(dim, (num_cells, -1))
    return cells.narrow(dim + 1, *part)
