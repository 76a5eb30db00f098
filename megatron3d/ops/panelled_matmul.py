"""Matmul in panels (`parallel.tp_num_panels` > 1): operands are gathered, and results reduced, slice by slice.

    panel j of an operand   gathered from slice j of every shard    during the GEMM of panel j - 1
    panel j of a result     reduced into slice j of every shard     during the GEMM of panel j + 1

Less of the gathered operands exists at a time.  Measured (benchmarks/results/overlaps.json): four panels take 1.1 to
1.6 times as long as the overlaps of `Matmul` on ranks that share cores, and gain at most 1.07 to 1.10 times over a
simulated slow network, so that one panel, `linear.matmul`, is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.collectives import W_DIMS, X_DIMS, Y_DIMS
from megatron3d.linear.main_grad import MainGrads, WgradQueue, WgradSum
from megatron3d.linear.matmul import Grads, Matmul
from megatron3d.linear.overlap_plan import Direction, TPOverlap
from megatron3d.linear.weight_prefetch import PrefetchedWeight
from megatron3d.ops.panels import Operand, Result, WholeOperand, operand, start_panel
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.panel_plan import PanelPlan, plan_panels, stored_over


class PanelledWeight(PrefetchedWeight):
    """W of a panelled matmul, prefetched for those passes only whose panels do not slice it."""

    def __init__(self, shard: Callable[[], Tensor], plan: MatmulPlan, comm: Comm, overlap: TPOverlap) -> None:
        super().__init__(shard, plan, comm, overlap)
        self._is_sliced = dict.fromkeys(Direction, True)

    def operand(self, at: Direction, panels: PanelPlan, backward_follows: bool = False) -> Operand:
        """Return W with its first panel in flight, and start to prefetch the neighbour's."""
        self._is_sliced[at] = panels.dim in W_DIMS
        w = self._take(at, backward_follows)
        if w is None:
            found = operand(self._shard().detach(), self._table, W_DIMS, self._comm, panels)
        elif self._is_sliced[at]:
            found = operand(w.wait(), {}, W_DIMS, self._comm, panels)
        else:
            found = WholeOperand(w, panels.num_panels)
        self._prefetch_neighbour(at)
        return found

    def prefetch(self, at: Direction, unshard: Callable[[], None]) -> None:
        if not self._is_sliced[at]:
            super().prefetch(at, unshard)


class PanelledMatmul(Matmul):
    """A matmul in at most `overlap.num_panels` panels along the dimension in which most bytes move."""

    def __init__(
        self,
        plan: MatmulPlan,
        comm: Comm,
        overlap: TPOverlap,
        main_grads: MainGrads | None = None,
        wgrads: WgradQueue | None = None,
        weight: PanelledWeight | None = None,
    ) -> None:
        super().__init__(plan, comm, overlap, main_grads, wgrads, weight)
        self._panelled_weight = weight
        self._plans: dict[tuple[Direction, int, int, int], PanelPlan] = {}

    def panels(self, at: Direction, x_MK: Tensor, w_NK: Tensor) -> PanelPlan:
        """Return the panels of a pass, planned once for each shape."""
        key = at, *x_MK.shape, w_NK.shape[0]
        if key not in self._plans:
            self._plans[key] = plan_panels(self.plan, at, self.sizes(x_MK, w_NK), self.overlap, self.comm.mesh)
        return self._plans[key]

    def sizes(self, x_MK: Tensor, w_NK: Tensor) -> dict[str, int]:
        """Return M, N and K of this rank's GEMM, from the shapes of the stored shards."""
        (m, k), (n, _) = x_MK.shape, w_NK.shape
        stored = {"M": (m, self.plan.x), "N": (n, self.plan.w), "K": (k, self.plan.x)}
        return {dim: size * self.comm.mesh.size(stored_over(table, dim)) for dim, (size, table) in stored.items()}

    def forward(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y; panel j + 1 of X and W is gathered during the GEMM of panel j."""
        plan, comm = self.plan, self.comm
        panels = self.panels(Direction.FORWARD, x_MK, w_NK)
        x = operand(x_MK, plan.x, X_DIMS, comm, panels)
        w = self._weight_operand(Direction.FORWARD, w_NK, panels, backward_follows)
        bias = None if bias_N is None or plan.k else operand(bias_N, {}, {"N": 0}, comm, panels)
        y = Result(moves(plan.y), plan.dy, Y_DIMS, comm, panels)
        for panel in range(panels.num_panels):
            start_panel(panel + 1, x, w, bias)
            y.multiply(panel, x.take(panel), w.take(panel), bias.take(panel) if bias else None)
        y_MN = y.finish().wait()
        return y_MN if bias_N is None or bias else y_MN.add_(bias_N)

    def backward(self, param: Tensor, x_MK: Tensor, w_NK: Tensor, dy_MN: Tensor, needs: tuple[bool, ...]) -> Grads:
        """Return the gradients; panel j + 1 of dY, W and X is gathered during the two GEMMs of panel j."""
        plan, comm = self.plan, self.comm
        needs_dx, needs_dw, needs_db = needs
        panels = self.panels(Direction.BACKWARD, x_MK, w_NK)
        start_x = partial(operand, x_MK, plan.x, X_DIMS, comm, panels)
        dy = operand(dy_MN, plan.dy, Y_DIMS, comm, panels)
        w = self._weight_operand(Direction.BACKWARD, w_NK, panels) if needs_dx else None
        x = start_x() if needs_dw and not self.wgrads.is_deferring else None
        db_N = dy_MN.sum(0) if needs_db else None
        dx = Result(plan.dx_moves, plan.x, X_DIMS, comm, panels, self.overlap.input_grad)
        dw = self._wgrad_result(param, panels)
        deferred: list[Tensor] = []
        for panel in range(panels.num_panels):
            start_panel(panel + 1, dy, w, x)
            dy_panel = dy.take(panel)
            if w:
                dx.multiply(panel, dy_panel, w.take(panel).T)
            if x:
                dw.multiply(panel, dy_panel.T, x.take(panel).T)
            elif needs_dw:
                deferred.append(dy_panel)

        def wgrad() -> Pending | None:
            if deferred:
                _multiply_deferred(dw, deferred, start_x())
            return dw.finish()

        dw_NK = self.wgrads.submit(param, wgrad) if needs_dw else None
        return dx.finish().wait() if needs_dx else None, self._added(param, dw_NK) if dw_NK else None, db_N

    def _weight_operand(
        self, at: Direction, w_NK: Tensor, panels: PanelPlan, backward_follows: bool = False
    ) -> Operand:
        if self._panelled_weight is None:
            return operand(w_NK, self.plan.w, W_DIMS, self.comm, panels)
        return self._panelled_weight.operand(at, panels, backward_follows)

    def _wgrad_result(self, param: Tensor, panels: PanelPlan) -> Result | WgradPanels:
        """Return dW in panels where they slice it, else as one sum."""
        if panels.num_panels > 1 and panels.dim in W_DIMS:
            dtype = self.main_grads.reduce_dtype(param, param.dtype)
            return Result(moves(self.plan.w), self.plan.w, W_DIMS, self.comm, panels, dtype=dtype)
        return WgradPanels(WgradSum(param, self.plan, self.comm, self.main_grads), panels.num_panels)


class WgradPanels:
    """dW as the sum over panels of M, whose reduction starts right after the last panel."""

    def __init__(self, total: WgradSum, num_panels: int) -> None:
        self._total, self._last = total, num_panels - 1
        self._reduction: Pending | None = None

    def multiply(self, panel: int, a_MK: Tensor, b_NK: Tensor) -> None:
        """Add a b^T, the GEMM of one panel, to dW."""
        self._total.add_product(a_MK, b_NK)
        if panel == self._last:
            self._reduction = self._total.finish()

    def finish(self) -> Pending | None:
        """Return the reduction in flight; None where the GEMMs have accumulated dW in main_grad."""
        return self._reduction


def _multiply_deferred(dw: Result | WgradPanels, dys: list[Tensor], x: Operand) -> None:
    """Compute the deferred wgrad; each panel of dY is freed after its GEMM."""
    dys.reverse()
    for panel in range(len(dys)):
        start_panel(panel + 1, x)
        dw.multiply(panel, dys.pop().T, x.take(panel).T)
