"""Changes of an activation's layout.

`relayout` gathers the axes that the new layout lacks and keeps the shard of those that it adds.  Both layouts describe
the same tensor, which ranks along other axes hold as copies.  So backward is the change back.

`TokenRelayout` turns the residual stream into whole rows: every rank gets tokens of its own, with all their features.

    [tokens / t, hidden / f], c copies   ->   [tokens / (t f c), hidden]

An all-to-all over the axes that split features exchanges them for tokens, and of rows that ranks hold as copies each
takes its own; the way back is the inverse.  Where neither exists nothing is moved.  Letters: M tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.plan import dim_changes
from megatron3d.parallel.layout import Layout, span
from megatron3d.parallel.mesh import Axes

Move = Callable[[Tensor], Tensor]


def relayout(x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
    """Return [M, F] in layout `target` from the same tensor in layout `source`; axes divide both dims evenly."""
    if not any(dim_changes(source, target, comm.mesh)):
        return x_MF
    y_MF: Tensor = _Relayout.apply(x_MF, source, target, comm)
    return y_MF


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
        ctx.layouts, ctx.comm = (source, target), comm
        return _changed(x_MF, source, target, comm)

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.layouts
        return _changed(dy_MF, target, source, ctx.comm), None, None, None


def _changed(x_MF: Tensor, source: Layout, target: Layout, comm: Comm) -> Tensor:
    """Gather all dims before any is cut: an axis that moves between dims cuts each rank differently."""
    changes = dim_changes(source, target, comm.mesh)
    for change in changes:
        x_MF = comm.all_gather(x_MF.contiguous(), change.gathered, change.dim).wait()
    for change in changes:
        low, high = span(x_MF.shape[change.dim], change.kept, comm.mesh)
        x_MF = x_MF.narrow(change.dim, low, high - low)
    x_MF = x_MF.contiguous()
    # Rows that are cut out would keep all that was gathered in memory.
    return x_MF if x_MF.nbytes == x_MF.untyped_storage().nbytes() else x_MF.clone()


class TokenRelayout:
    """Relayout of the residual stream's layout, which is replicated over the axes `copies`."""

    def __init__(self, residual: Layout, copies: Axes, comm: Comm) -> None:
        self.comm = comm
        self.features, self.copies = comm.mesh.nontrivial(residual[1]), comm.mesh.nontrivial(copies)

    def to_rows(self, x_MH: Tensor) -> Tensor:
        """Return this rank's own rows, with all features."""
        return self._moved(x_MH, self.spread, self.collect)

    def from_rows(self, rows_MH: Tensor) -> Tensor:
        """Return the shard of the residual stream, given this rank's own rows."""
        return self._moved(rows_MH, self.collect, self.spread)

    def _moved(self, x_MH: Tensor, there: Move, back: Move) -> Tensor:
        if not self.features and not self.copies:
            return x_MH
        y_MH: Tensor = _MovedRows.apply(x_MH, there, back)
        return y_MH

    def spread(self, x_MH: Tensor) -> Tensor:
        """Exchange features for tokens, and take this rank's rows of the copies."""
        if self.features:
            blocks = x_MH.unflatten(0, (self.comm.mesh.size(self.features), -1))
            x_MH = self.comm.all_to_all(blocks, self.features).wait().movedim(0, 1).flatten(1)
        if self.copies:
            # A copy, since a view would keep the rows of all copies in memory.
            x_MH = x_MH.chunk(self.comm.mesh.size(self.copies))[self.comm.mesh.index(self.copies)].clone()
        return x_MH

    def collect(self, rows_MH: Tensor) -> Tensor:
        """Undo `spread`."""
        rows_MH = rows_MH.contiguous()
        if self.copies:
            rows_MH = self.comm.all_gather(rows_MH, self.copies, 0).wait()
        if self.features:
            blocks = rows_MH.unflatten(1, (self.comm.mesh.size(self.features), -1)).movedim(1, 0)
            rows_MH = self.comm.all_to_all(blocks.contiguous(), self.features).wait().flatten(0, 1)
        return rows_MH


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x_MH)

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy_MH), None, None
