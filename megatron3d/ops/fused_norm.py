"""LayerNorm and RMSNorm over sharded features with one Triton kernel between two collectives.

    statistics   mean and mean square about it (LayerNorm), or the mean square (RMSNorm), of this rank's features
    all-gather or all-reduce
    Y            (x - mean) scale weight + bias,  scale = 1 / sqrt(mean square of all + eps)

    sums         of dy weight unit, and of dy weight (LayerNorm), where unit = (x - mean) scale
    all-reduce, while the gradients of weight and bias are summed in groups of tokens
    dX           (dy weight - unit sum1 / H - sum2 / H) scale

The values are those of `ops/norm.py`, in 2 kernels forward and 4 or 5 backward.  Letters: M tokens, H this rank's
features, R ranks, C 2 with a mean (LayerNorm) and 1 without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.mesh import Axes


class FusedShardedNorm(torch.autograd.Function):
    """The norm of `ops/norm.py` over sharded features, for tensors of at most 32 bits on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, axes: Axes, comm: Comm
    ) -> Tensor:
        """Return Y in the dtype of X."""
        from megatron3d.ops.triton_norm import write_normalized, write_statistics

        x_MH = x_MH if x_MH.stride(-1) == 1 else x_MH.contiguous()
        ranks, centred = comm.mesh.size(axes), bias_H is not None
        mine_CM = x_MH.new_empty((1 + centred, len(x_MH)), dtype=torch.float32)
        write_statistics(x_MH, mine_CM)
        combine = comm.all_gather(mine_CM.unsqueeze(0), axes, dim=0) if centred else comm.all_reduce(mine_CM, axes)
        statistics_RCM = combine.wait()
        y_MH, mean_scale_CM = torch.empty_like(x_MH), torch.empty_like(mine_CM)
        write_normalized(x_MH, statistics_RCM, (weight_H, bias_H), eps, ranks, (y_MH, mean_scale_CM))
        ctx.axes, ctx.comm = axes, comm
        ctx.save_for_backward(x_MH, weight_H, mean_scale_CM)
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        """Return dX and the gradients of weight and bias."""
        from megatron3d.ops.triton_norm import weight_grads, write_input_grad, write_sums

        x_MH, weight_H, mean_scale_CM = ctx.saved_tensors
        dy_MH = dy_MH if dy_MH.stride(-1) == 1 else dy_MH.contiguous()
        sums_CM = torch.empty_like(mean_scale_CM)
        write_sums(x_MH, dy_MH, weight_H, mean_scale_CM, sums_CM)
        pending = ctx.comm.all_reduce(sums_CM, ctx.axes)
        dweight, *dbias = weight_grads(x_MH, dy_MH, mean_scale_CM).sum(1).to(weight_H.dtype).unbind()
        dx_MH = torch.empty_like(x_MH)
        ranks = ctx.comm.mesh.size(ctx.axes)
        write_input_grad(x_MH, dy_MH, weight_H, mean_scale_CM, pending.wait(), dx_MH, ranks)
        return dx_MH, dweight, dbias[0] if dbias else None, None, None, None
