"""Exchange of tokens between the ranks that the experts of a layer are distributed over, by all-gather.

    forward     all-gather tokens, choices and weights over the expert axes; experts; reduce-scatter the outputs
    backward    all-gather gradients of outputs; reduce-scatter those of tokens and weights

A rank sends 2 m h (EP - 1) elements in each direction for its m tokens of width h, whatever the routing is
(MegaScale-MoE, arXiv:2505.11432).  Letters: M tokens, H hidden, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.mesh import Axes


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, comm: Comm) -> Tensor:
        ctx.axes, ctx.comm = axes, comm
        return comm.all_gather(x.contiguous(), axes, 0).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(dy.contiguous(), ctx.axes, 0).wait(), None, None


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, comm: Comm) -> Tensor:
        ctx.axes, ctx.comm = axes, comm
        return comm.reduce_scatter(x.contiguous(), axes, 0).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(dy.contiguous(), ctx.axes, 0).wait(), None, None


def gather_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return the rows of all ranks of `axes`; gradients are summed over them."""
    y: Tensor = _GatherRows.apply(x, axes, comm) if axes else x
    return y


def reduce_rows(x: Tensor, axes: Axes, comm: Comm) -> Tensor:
    """Return this rank's rows of the sum over `axes`."""
    y: Tensor = _ReduceRows.apply(x, axes, comm) if axes else x
    return y
