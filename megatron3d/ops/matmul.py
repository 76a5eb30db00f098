"""The one matmul: gather X, gather W, multiply, reduce Y; backward is the same sentence with the roles turned.

Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
Shards are kept for backward, never the gathered operands.  In backward the reduction of dX runs under the
weight-gradient product, and the gather of X under the input-gradient product (Singh et al. 2024, arXiv:2305.13525).
A `Sweep` does all of it panel by panel, with one panel as the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.process_comm import Comm, Pending
from megatron3d.ops.collectives import W_DIMS, X_DIMS, Y_DIMS
from megatron3d.ops.gemm import uses_onednn
from megatron3d.ops.main_grad import sink_of
from megatron3d.ops.panels import Operand, Result, WeightResult, begin, operand, weight_result
from megatron3d.ops.weight_prefetch import GatheredWeight, WeightGrads
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.panel_plan import Sweep, choose, stored_over
from megatron3d.parallel.tp_overlap import OVERLAP_ALL, Direction, TPOverlap


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    plan: MatmulPlan,
    comm: Comm,
    weight_grads: WeightGrads | None = None,
) -> Tensor:
    """Y[M, N] = X W^T + bias by a `Matmul` of its own."""
    return Matmul(plan, comm, weight_grads=weight_grads)(x_MK, w_NK, bias_N)


class Matmul:
    """A planned matmul, which names no axis of size 1, and how it is carried out.

    Args:
        weight_grads: where weight gradients go; None: back to autograd, at once.
        weight: where W is gathered ahead or kept; None: it is gathered when it is needed.
    """

    def __init__(
        self,
        plan: MatmulPlan,
        comm: Comm,
        overlap: TPOverlap = OVERLAP_ALL,
        weight_grads: WeightGrads | None = None,
        weight: GatheredWeight | None = None,
    ) -> None:
        self.plan, self.comm, self.overlap, self.weight = plan, comm, overlap, weight
        self.weight_grads = weight_grads or WeightGrads()
        self.is_plain = not (plan.m or plan.k or plan.n or weight_grads)
        self._sweeps: dict[tuple[Direction, int, int, int], Sweep] = {}

    def __call__(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Y[M, N] = X W^T + bias; every operand, and Y, as the plan stores them."""
        if self._is_left_to_torch(x_MK, w_NK):
            return F.linear(x_MK, w_NK, bias_N)
        will_return = x_MK.requires_grad and torch.is_grad_enabled()
        y_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, self, will_return)
        return y_MN

    def _is_left_to_torch(self, x_MK: Tensor, w_NK: Tensor) -> bool:
        """A compiler cannot know of sinks; its graphs give the gradient back."""
        if not self.is_plain or uses_onednn(x_MK.device, x_MK.dtype):
            return False
        return torch.compiler.is_compiling() or not torch.is_grad_enabled() or sink_of(w_NK) is None

    def sweep(self, at: Direction, x_MK: Tensor, w_NK: Tensor) -> Sweep:
        """The panels of a pass."""
        key = at, *x_MK.shape, w_NK.shape[0]
        if key not in self._sweeps:
            self._sweeps[key] = choose(self.plan, at, self.sizes(x_MK, w_NK), self.overlap, self.comm.mesh)
        return self._sweeps[key]

    def sizes(self, x_MK: Tensor, w_NK: Tensor) -> dict[str, int]:
        """M, N and K of the product that I multiply myself, from what is stored."""
        (m, k), (n, _) = x_MK.shape, w_NK.shape
        stored = {"M": (m, self.plan.x), "N": (n, self.plan.w), "K": (k, self.plan.x)}
        return {dim: size * self.comm.mesh.size(stored_over(table, dim)) for dim, (size, table) in stored.items()}

    def weight_operand(self, at: Direction, w_NK: Tensor, sweep: Sweep, will_return: bool = False) -> Operand:
        """W on its way, from where it is."""
        if self.weight is None:
            return operand(w_NK, self.plan.w, W_DIMS, self.comm, sweep)
        return self.weight.operand(at, sweep, will_return)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmul: Matmul, will_return: bool
    ) -> Tensor:
        # The leaf itself: what is saved comes back as another tensor where it is computed again.
        ctx.matmul, ctx.leaf = matmul, w_NK
        ctx.save_for_backward(x_MK, w_NK)
        plan, comm, sweep = matmul.plan, matmul.comm, matmul.sweep(Direction.FORWARD, x_MK, w_NK)
        x = operand(x_MK, plan.x, X_DIMS, comm, sweep)
        w = matmul.weight_operand(Direction.FORWARD, w_NK, sweep, will_return)
        bias = None if bias_N is None or plan.k else operand(bias_N, {}, {"N": 0}, comm, sweep)
        y = Result(moves(plan.y), plan.dy, Y_DIMS, comm, sweep)
        for panel in range(sweep.num_panels):
            begin(panel + 1, x, w, bias)
            y.multiply(panel, x.take(panel), w.take(panel), bias.take(panel) if bias else None)
        y_MN = y.finish().wait()
        return y_MN if bias_N is None or bias else y_MN.add_(bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        matmul: Matmul = ctx.matmul
        plan, comm, grads = matmul.plan, matmul.comm, matmul.weight_grads
        x_MK, w_NK = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        sweep = matmul.sweep(Direction.BACKWARD, x_MK, w_NK)
        begin_x = partial(operand, x_MK, plan.x, X_DIMS, comm, sweep)

        dy = operand(dy_MN, plan.dy, Y_DIMS, comm, sweep)
        w = matmul.weight_operand(Direction.BACKWARD, w_NK, sweep) if needs_dx else None
        x = begin_x() if needs_dw and not grads.is_waiting else None
        db_N = dy_MN.sum(0) if needs_db else None
        dx = Result(plan.dx_moves, plan.x, X_DIMS, comm, sweep, matmul.overlap.input_grad)
        dw = weight_result(ctx.leaf, plan, comm, sweep)
        waiting: list[Tensor] = []
        for panel in range(sweep.num_panels):
            begin(panel + 1, dy, w, x)
            here = dy.take(panel)
            if w:
                dx.multiply(panel, here, w.take(panel).T)
            if x:
                dw.multiply(panel, here.T, x.take(panel).T)
            elif needs_dw:
                waiting.append(here)

        def weight_grad() -> Pending | None:
            if waiting:
                _multiply_later(dw, waiting, begin_x())
            return dw.finish()

        dw_NK = grads.deliver(ctx.leaf, weight_grad) if needs_dw else None
        return dx.finish().wait() if needs_dx else None, dw_NK.wait() if dw_NK else None, db_N, None, None


def _multiply_later(dw: WeightResult, dys: list[Tensor], x: Operand) -> None:
    """The products of the second half of a split backward; panels of dY are given up one by one."""
    dys.reverse()
    for panel in range(len(dys)):
        begin(panel + 1, x)
        dw.multiply(panel, dys.pop().T, x.take(panel).T)
