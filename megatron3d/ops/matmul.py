"""The one matmul: gather X, gather W, multiply, reduce Y; backward is the same sentence with the roles turned.

Letters: M tokens, K input features, N output features; each means the global dimension, shard or not.
Shards are kept for backward, never the gathered operands.  In backward the reduction of dX runs under the
weight-gradient product, and the gather of X under the input-gradient product (Singh et al. 2024, arXiv:2305.13525).
A schedule that splits the backward puts the weight gradients off (Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm import Comm, Pending, ready
from megatron3d.ops.product import product, uses_onednn
from megatron3d.plan import MatmulPlan, Move, moves

X_DIMS, W_DIMS, Y_DIMS = {"M": 0, "K": 1}, {"N": 0, "K": 1}, {"M": 0, "N": 1}


class WeightGrads:
    """Weight gradients that wait: what a backward inside `put_off` leaves undone is done by `deliver`."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = None

    @contextlib.contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the weight gradients of the backward in the body, to be called later in order."""
        waiting: list[Callable[[], None]] = []
        self._waiting = waiting
        yield waiting
        self._waiting = None

    @property
    def is_waiting(self) -> bool:
        """Whether weight gradients are put off now."""
        return self._waiting is not None

    def deliver(self, w: Tensor, compute: Callable[[], Pending]) -> Pending | None:
        """The gradient of `w` on its way, or None where it is put off: then `accumulate` adds it later."""
        if self._waiting is None:
            return compute()
        self._waiting.append(lambda: accumulate(w, compute().wait()))
        return None


def accumulate(w: Tensor, dw: Tensor) -> None:
    """Add to a leaf's gradient what was computed outside of autograd's own pass; its hooks run."""
    torch.autograd.backward([w], [dw])


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    plan: MatmulPlan,
    comm: Comm,
    weight_grads: WeightGrads | None = None,
) -> Tensor:
    """Y[M, N] = X W^T + bias under `plan`, which names no axis of size 1 (`MatmulPlan.on`).

    With `weight_grads` the backward can be split.
    """
    if not (plan.m or plan.k or plan.n or weight_grads or uses_onednn(x_MK.device, x_MK.dtype)):
        return F.linear(x_MK, w_NK, bias_N)
    y_MN: Tensor = _Matmul.apply(x_MK, w_NK, bias_N, plan, comm, weight_grads or WeightGrads())
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
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        plan: MatmulPlan,
        comm: Comm,
        weight_grads: WeightGrads,
    ) -> Tensor:
        ctx.plan, ctx.comm, ctx.weight_grads = plan, comm, weight_grads
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
        whole_w = gather(w_NK, plan.w, W_DIMS, comm)
        begin_x = partial(gather, x_MK, plan.x, X_DIMS, comm)
        whole_x = begin_x() if needs_dw and not ctx.weight_grads.is_waiting else None
        db_N = dy_MN.sum(0) if needs_db else None
        dy = whole_dy.wait()
        dx = reduce(product(dy, whole_w.wait().T), plan.dx_moves, X_DIMS, comm) if needs_dx else None

        def weight_grad() -> Pending:
            x = (whole_x or begin_x()).wait()
            return reduce(product(dy.T, x.T), moves(plan.w), W_DIMS, comm)

        dw = ctx.weight_grads.deliver(w_NK, weight_grad) if needs_dw else None
        return dx.wait() if dx else None, dw.wait() if dw else None, db_N, None, None, None
