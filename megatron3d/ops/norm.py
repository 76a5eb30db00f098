"""LayerNorm and RMSNorm over features that may be sharded, with statistics combined over the axes that shard them.

    statistics   mean and mean square about it (LayerNorm), or the mean square (RMSNorm), of this rank's features
    all-gather or all-reduce
    Y            (x - mean) scale weight + bias,  scale = 1 / sqrt(mean square of all + eps)

    sums         of dy weight unit, and of dy weight (LayerNorm), where unit = (x - mean) scale
    all-reduce, while the gradients of weight and bias are summed in groups of tokens
    dX           (dy weight - unit sum1 / H - sum2 / H) scale

Means and centred squares of the shards are combined as in Chan, Golub and LeVeque (1979), in fp32 or wider, which
avoids the cancellation in E[x^2] - E[x]^2.  On GPUs Triton computes it in 2 kernels forward and 4 or 5 backward.
Letters: M tokens, H this rank's features, R ranks, C 2 with a mean (LayerNorm) and 1 without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.mesh import Axes
from megatron3d.runtime.machine import has_triton


class FusedShardedNorm(torch.autograd.Function):
    """The norm over sharded features, for tensors of at most 32 bits on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, axes: Axes, comm: Comm
    ) -> Tensor:
        """Return Y in the dtype of X."""
        from megatron3d.ops.triton_kernels import write_norm_statistics, write_normalized

        x_MH = x_MH if x_MH.stride(-1) == 1 else x_MH.contiguous()
        ranks, centred = comm.mesh.size(axes), bias_H is not None
        mine_CM = x_MH.new_empty((1 + centred, len(x_MH)), dtype=torch.float32)
        write_norm_statistics(x_MH, mine_CM)
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
        from megatron3d.ops.triton_kernels import weight_grads, write_input_grad, write_sums

        x_MH, weight_H, mean_scale_CM = ctx.saved_tensors
        dy_MH = dy_MH if dy_MH.stride(-1) == 1 else dy_MH.contiguous()
        sums_CM = torch.empty_like(mean_scale_CM)
        write_sums(x_MH, dy_MH, weight_H, mean_scale_CM, sums_CM)
        pending = ctx.comm.all_reduce(sums_CM, ctx.axes)
        dweight, *dbias = weight_grads(x_MH, dy_MH, mean_scale_CM).sum(1).to(weight_H.dtype).unbind()
        dx_MH = torch.empty_like(x_MH)
        ranks = ctx.comm.mesh.size(ctx.axes)
        write_input_grad(x_MH, dy_MH, weight_H, mean_scale_CM, pending.wait(), dx_MH, ranks=ranks)
        return dx_MH, dweight, dbias[0] if dbias else None, None, None, None


@dataclass(frozen=True)
class NormKernels:
    """Kernels for unsharded rows, with autograd: layer_norm(x, weight, bias, eps) and rms_norm(x, weight, eps)."""

    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]


TORCH_NORMS = NormKernels(
    lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
)


def norm(
    x_MH: Tensor,
    weight_H: Tensor,
    bias_H: Tensor | None,
    eps: float,
    axes: Axes,
    comm: Comm,
    *,
    kernels: NormKernels = TORCH_NORMS,
) -> Tensor:
    """Return LayerNorm where there is a bias, else RMSNorm; `axes` (none of size 1) shard the features."""
    if axes:
        sharded = SHARDED_NORMS[sharded_norm(x_MH.is_cuda, x_MH.dtype)]
        y_MH: Tensor = sharded.apply(x_MH, weight_H, bias_H, eps, axes, comm)
        return y_MH
    if bias_H is None:
        return kernels.rms_norm(x_MH, weight_H, eps)
    return kernels.layer_norm(x_MH, weight_H, bias_H, eps)


def _statistics(x_MH: Tensor, centred: bool, axes: Axes, comm: Comm) -> tuple[Tensor | None, Tensor]:
    """Return the mean (None where not centred) and the mean square about it, each [M, 1], over all features."""
    ranks = comm.mesh.size(axes)
    if not centred:
        square = x_MH.square().mean(-1, keepdim=True) / ranks
        return None, comm.all_reduce(square, axes).wait()
    var, mean = torch.var_mean(x_MH, -1, keepdim=True, correction=0)
    shards_M2R = comm.all_gather(torch.cat((mean, var), -1).unsqueeze(-1), axes, dim=2).wait()
    means, variances = shards_M2R.unbind(1)
    spread, mean = torch.var_mean(means, -1, keepdim=True, correction=0)
    return mean, variances.mean(-1, keepdim=True) + spread


class _ShardedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, axes: Axes, comm: Comm
    ) -> Tensor:
        wide = x_MH.to(torch.promote_types(x_MH.dtype, torch.float32))
        mean, square = _statistics(wide, bias_H is not None, axes, comm)
        scale = torch.rsqrt(square + eps)
        ctx.axes, ctx.comm = axes, comm
        ctx.centred = bias_H is not None
        ctx.save_for_backward(x_MH, weight_H, mean, scale)
        unit = (wide if mean is None else wide - mean) * scale
        y = unit * weight_H if bias_H is None else torch.addcmul(bias_H.to(wide.dtype), unit, weight_H.to(wide.dtype))
        return y.to(x_MH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        x_MH, weight_H, mean, scale = ctx.saved_tensors
        unit, dy = x_MH.to(scale.dtype), dy_MH.to(scale.dtype)
        unit = (unit - mean if ctx.centred else unit) * scale
        dunit = dy * weight_H.to(scale.dtype)
        product = (dunit * unit).sum(-1)
        sums = torch.stack((product, dunit.sum(-1))) if ctx.centred else product.unsqueeze(0)
        pending = ctx.comm.all_reduce(sums, ctx.axes)
        dweight = (dy * unit).sum(0).to(weight_H.dtype)
        dbias = dy.sum(0).to(weight_H.dtype) if ctx.centred else None
        features = x_MH.shape[-1] * ctx.comm.mesh.size(ctx.axes)
        means = (pending.wait() / features).unsqueeze(-1)
        dunit = dunit - unit * means[0]
        dx = (dunit - means[1] if ctx.centred else dunit) * scale
        return dx.to(x_MH.dtype), dweight, dbias, None, None, None


SHARDED_NORMS: Mapping[str, Any] = {"torch": _ShardedNorm, "triton": FusedShardedNorm}


def sharded_norm(is_on_gpu: bool, dtype: torch.dtype) -> str:
    """Return the entry of `SHARDED_NORMS` that computes norms over sharded features of a dtype."""
    return "triton" if is_on_gpu and dtype != torch.float64 and has_triton() else "torch"
