"""Matmul whose exposed collectives run in rounds with its own GEMMs (`parallel.tp_comm_overlap`).

    forward     all-gather and GEMM, or GEMM and reduce-scatter
    backward    all-gather of dY and dgrad GEMM; the gathered dY serves the wgrad GEMM as well
                dgrad GEMM and reduce-scatter of dX, where no wgrad GEMM follows that this can overlap with

`parallel.async_plan` says which collectives fit; all others are those of `ops.matmul`.  Letters as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.ops.collectives import X_DIMS, Y_DIMS, gather, reduce
from megatron3d.ops.gemm import put_product
from megatron3d.ops.matmul import Matmul
from megatron3d.parallel.async_plan import async_plan
from megatron3d.parallel.matmul_plan import Move, moves
from megatron3d.parallel.tp_overlap import Direction


class AsyncMatmul(Matmul):
    """A matmul that overlaps the collectives of an `AsyncPlan` with its own GEMMs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rounds = async_plan(self.plan)

    def forward(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y; the bias is added once, to the finished sum."""
        plan, comm, rounds = self.plan, self.comm, self._rounds
        if not rounds.x and not rounds.y:
            return super().forward(x_MK, w_NK, bias_N, backward_follows)
        x = gather(x_MK, _without(plan.x, rounds.x), X_DIMS, comm)
        w = self.gather_weight(Direction.FORWARD, w_NK, backward_follows)
        if rounds.x:
            whole = comm.all_gather_matmul(x.wait(), w.wait(), rounds.x.axes, put_product).product
            y = reduce(whole, moves(plan.y), Y_DIMS, comm)
        else:
            y = self._scattered(x.wait(), w.wait(), moves(plan.y), Y_DIMS)
        y_MN = y.wait()
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    def start_dy(self, dy_MN: Tensor, needs_dx: bool) -> Pending:
        return gather(dy_MN, _without(self.plan.dy, self._rounds.dy if needs_dx else None), Y_DIMS, self.comm)

    def dgrad(self, dy: Pending, w: Pending | None, wgrad_follows: bool) -> tuple[Tensor, Pending | None]:
        plan, rounds = self.plan, self._rounds
        if w and rounds.dy:
            dy_MN, dx_MK = self.comm.all_gather_matmul(dy.wait(), w.wait().T, rounds.dy.axes, put_product)
            return dy_MN, reduce(dx_MK, plan.dx_moves, X_DIMS, self.comm)
        if w and rounds.dx and not wgrad_follows:
            dy_MN = dy.wait()
            return dy_MN, self._scattered(dy_MN, w.wait().T, plan.dx_moves, X_DIMS)
        return super().dgrad(dy, w, wgrad_follows)

    def _scattered(self, a_MK: Tensor, b_NK: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int]) -> Pending:
        """Return a b^T reduced by `steps`, the first of which runs in rounds with the GEMM."""
        first, *others = steps
        part = self.comm.matmul_reduce_scatter(a_MK, b_NK, first.axes, dims[str(first.dim)], put_product)
        return Pending(lambda: reduce(part.wait(), tuple(others), dims, self.comm).wait())


def _without(table: Mapping[str, str], move: Move | None) -> dict[str, str]:
    """Return a table of gathers without the one that runs in rounds."""
    return {axis: dim for axis, dim in table.items() if not move or axis not in move.axes}
