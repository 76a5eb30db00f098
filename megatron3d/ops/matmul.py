"""The one matmul of every tensor-parallel mode (Singh et al. 2024, arXiv:2305.13525, algorithm 1).

    forward     gather X, gather W, multiply, reduce Y
    backward    gather dY, gather W, dX = dY W, reduce dX during the wgrad GEMM;  gather X, dW = dY^T X, reduce dW

The tables of the `MatmulPlan` name the axes of each gather and reduction; without axes there is no communication.
Only shards are saved for backward.  Two hooks: `PrefetchedWeight` gathers W early, `WgradQueue` defers dW.
Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.ops.collectives import W_DIMS, X_DIMS, Y_DIMS, gather, reduce
from megatron3d.ops.compiled_matmul import CompiledLinear
from megatron3d.ops.gemm import product, product_in, uses_onednn
from megatron3d.ops.main_grad import MainGrads
from megatron3d.ops.plain_matmul import plain_matmul
from megatron3d.ops.weight_prefetch import PrefetchedWeight
from megatron3d.ops.wgrad_queue import WgradQueue
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.tp_overlap import OVERLAP_ALL, Direction, TPOverlap

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


class Matmul:
    """A planned matmul; its plan names no axis of size 1.

    Args:
        main_grads: buffers that wgrad GEMMs accumulate in; None: gradients go back to autograd.
        wgrads: hook that defers weight gradients or keeps their reductions in flight; None: neither.
        weight: hook that prefetches or keeps the gathered W; None: W is gathered when it is needed.
        compiled: Y(x, w, bias) inside a compiled graph, where the matmul is plain; None: `F.linear`.
    """

    def __init__(
        self,
        plan: MatmulPlan,
        comm: Comm,
        overlap: TPOverlap = OVERLAP_ALL,
        main_grads: MainGrads | None = None,
        wgrads: WgradQueue | None = None,
        weight: PrefetchedWeight | None = None,
        compiled: CompiledLinear | None = None,
    ) -> None:
        self.plan, self.comm = plan, comm
        self.overlap, self.weight = overlap, weight
        self._compiled = compiled
        self.main_grads = main_grads or MainGrads()
        self.wgrads = wgrads or WgradQueue(self.main_grads)
        self.is_plain = not (plan.m or plan.k or plan.n or wgrads)

    def __call__(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return Y[M, N] = X W^T + bias; operands and Y are shards in the plan's layouts."""
        if self.is_plain and (y_MN := self._plain(x_MK, w_NK, bias_N)) is not None:
            return y_MN
        backward_follows = x_MK.requires_grad and torch.is_grad_enabled()
        planned_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, self, backward_follows)
        return planned_MN

    def _plain(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor | None:
        """Return Y by the shortest way that suffices without axes and hooks; None where none does."""
        if torch.compiler.is_compiling():
            return self._compiled(x_MK, w_NK, bias_N) if self._compiled else F.linear(x_MK, w_NK, bias_N)
        if not torch.is_grad_enabled():
            return product(x_MK, w_NK, bias_N)
        if self.main_grads.buffer(w_NK) is None:
            return None if uses_onednn(x_MK.device, x_MK.dtype) else F.linear(x_MK, w_NK, bias_N)
        return plain_matmul(x_MK, w_NK, bias_N, self.main_grads) if x_MK.requires_grad else None

    def forward(self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, backward_follows: bool) -> Tensor:
        """Return Y, with the bias added once: in the GEMM, or to the reduced sum where K is split."""
        plan, comm = self.plan, self.comm
        x = gather(x_MK, plan.x, X_DIMS, comm)
        w = self.gather_weight(Direction.FORWARD, w_NK, backward_follows)
        y = reduce(product(x.wait(), w.wait(), None if plan.k else bias_N), moves(plan.y), Y_DIMS, comm)
        y_MN = y.wait()
        return y_MN.add_(bias_N) if plan.k and bias_N is not None else y_MN

    def backward(self, param: Tensor, x_MK: Tensor, w_NK: Tensor, dy_MN: Tensor, needs: tuple[bool, ...]) -> Grads:
        """Return the gradients that autograd needs of X, W and bias; dW is None where it goes to main_grad."""
        plan, comm = self.plan, self.comm
        needs_dx, needs_dw, needs_db = needs
        dy_pending = self.start_dy(dy_MN, needs_dx)
        w = self.gather_weight(Direction.BACKWARD, w_NK) if needs_dx else None
        x = gather(x_MK, plan.x, X_DIMS, comm) if needs_dw and not self.wgrads.is_deferring else None
        db_N = dy_MN.sum(0) if needs_db else None
        wgrad_follows = needs_dw and not self.wgrads.is_deferring and self.overlap.input_grad
        dy, dx = self.dgrad(dy_pending, w, wgrad_follows)
        if dx and not self.overlap.input_grad:
            dx = completed(dx.wait())
        operands = [dy]  # taken by the wgrad GEMM, so that a deferred dY is freed before dW is reduced

        def wgrad() -> Pending | None:
            x_whole = (x or gather(x_MK, plan.x, X_DIMS, comm)).wait()
            return self._wgrad(param, operands.pop(), x_whole)

        dw = self.wgrads.submit(param, wgrad) if needs_dw else None
        return dx.wait() if dx else None, self._added(param, dw) if dw else None, db_N

    def start_dy(self, dy_MN: Tensor, needs_dx: bool) -> Pending:
        """Start to all-gather dY, for the dgrad GEMM where `needs_dx`, and for the wgrad GEMM."""
        return gather(dy_MN, self.plan.dy, Y_DIMS, self.comm)

    def dgrad(self, dy: Pending, w: Pending | None, wgrad_follows: bool) -> tuple[Tensor, Pending | None]:
        """Return the gathered dY, and dX in flight; None without W.

        Args:
            wgrad_follows: the reduction of dX will overlap with the wgrad GEMM.
        """
        plan, comm, dy_MN = self.plan, self.comm, dy.wait()
        return dy_MN, reduce(product(dy_MN, w.wait().T), plan.dx_moves, X_DIMS, comm) if w else None

    def _added(self, param: Tensor, dw: Pending) -> Tensor | None:
        """Add dW to main_grad, past autograd, which would round it; without a buffer return it to autograd."""
        if self.main_grads.buffer(param) is None:
            return dw.wait()
        self.main_grads.add(param, dw.wait())
        return None

    def _wgrad(self, param: Tensor, dy_MN: Tensor, x_MK: Tensor) -> Pending | None:
        """Multiply dY^T X and start to reduce it; accumulate it in main_grad where nothing reduces it."""
        if not self.plan.w and self.main_grads.accumulate(param, dy_MN.T, x_MK.T):
            return None
        dtype = self.main_grads.reduce_dtype(param, dy_MN.dtype)
        return reduce(product_in(dtype, dy_MN.T, x_MK.T), moves(self.plan.w), W_DIMS, self.comm)

    def gather_weight(self, at: Direction, w_NK: Tensor, backward_follows: bool = False) -> Pending:
        """Return the gathered W, through the prefetch hook where there is one."""
        if self.weight is None:
            return gather(w_NK, self.plan.w, W_DIMS, self.comm)
        return self.weight.gather(at, backward_follows)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmul: Matmul, backward_follows: bool
    ) -> Tensor:
        # The parameter itself names its main_grad; what is saved comes back as another tensor after recomputation.
        ctx.matmul, ctx.param = matmul, w_NK
        ctx.save_for_backward(x_MK, w_NK)
        return matmul.forward(x_MK, w_NK, bias_N, backward_follows)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        grads: Grads = ctx.matmul.backward(ctx.param, *ctx.saved_tensors, dy_MN, ctx.needs_input_grad[:3])
        return *grads, None, None


def linear(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: MatmulPlan, comm: Comm, wgrads: WgradQueue | None = None
) -> Tensor:
    """Return Y[M, N] = X W^T + bias by a `Matmul` that is made for this one call."""
    return Matmul(plan, comm, wgrads=wgrads)(x_MK, w_NK, bias_N)
