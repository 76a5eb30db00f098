"""The one matmul: gather X, gather W, multiply, reduce Y; backward is the same sentence with the roles turned.

Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
Shards are kept for backward, never the gathered operands.  In backward the reduction of dX runs under the
weight-gradient product, and the gather of X under the input-gradient product (Singh et al. 2024, arXiv:2305.13525).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm import Comm, Pending, ready
from megatron3d.ops.product import product, uses_onednn
from megatron3d.plan import MatmulPlan, Move, moves

X_DIMS, W_DIMS, Y_DIMS = {"M": 0, "K": 1}, {"N": 0, "K": 1}, {"M": 0, "N": 1}


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: MatmulPlan, comm: Comm) -> Tensor:
    """Y[M, N] = X W^T + bias under `plan`, which names no axis of size 1 (`MatmulPlan.on`)."""
    if not (plan.m or plan.k or plan.n or uses_onednn(x_MK.device, x_MK.dtype)):
        return F.linear(x_MK, w_NK, bias_N)
    y_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, plan, comm)
    return y_MN


def gather(t: Tensor, table: Mapping[str, str], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Begin to gather everything that the table says is stored split; what was split last is gathered first."""
    steps = moves(table)[::-1]
    if not steps:
        return ready(t)
    pending = comm.all_gather(t, steps[0].axes, dims[str(steps[0].dim)])

    def finish() -> Tensor:
        out = pending.wait()
        for axes, dim in steps[1:]:
            out = comm.all_gather(out, axes, dims[str(dim)]).wait()
        return out

    return Pending(finish)


def reduce(t: Tensor, steps: tuple[Move, ...], dims: Mapping[str, int], comm: Comm) -> Pending:
    """Begin to reduce partial sums, scattering them where a step names a dimension."""
    if not steps:
        return ready(t)

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
    """Begin to undo the scatter of Y."""
    return gather(dy_MN, plan.dy, Y_DIMS, comm)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: MatmulPlan, comm: Comm) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        ctx.save_for_backward(x_MK, w_NK)
        whole_x, whole_w = gather(x_MK, plan.x, X_DIMS, comm), gather(w_NK, plan.w, W_DIMS, comm)
        if not plan.k:
            return product(whole_x.wait(), whole_w.wait(), bias_N)
        y_MN = reduce(product(whole_x.wait(), whole_w.wait()), moves(plan.y), Y_DIMS, comm).wait()
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        plan, comm = ctx.plan, ctx.comm
        x_MK, w_NK = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        whole_dy = gather_dy(dy_MN, plan, comm)
        whole_w, whole_x = gather(w_NK, plan.w, W_DIMS, comm), gather(x_MK, plan.x, X_DIMS, comm)
        db_N = dy_MN.sum(0) if needs_db else None
        dy = whole_dy.wait()
        dx = reduce(product(dy, whole_w.wait().T), plan.dx_moves, X_DIMS, comm) if needs_dx else None
        dw = reduce(product(dy.T, whole_x.wait().T), moves(plan.w), W_DIMS, comm) if needs_dw else None
        return dx.wait() if dx else None, dw.wait() if dw else None, db_N, None, None
