"""Operations of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) on shards.

Letters: M tokens, R features of latents, B sequences, S positions, L positions in the cache, N heads, D features of a
head, H inputs and F outputs of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.attention.heads_plan import row_axes
from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import W_DIMS, X_DIMS, gather, reduce
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import Axes


def whole_features(x_MR: Tensor, plan: MatmulPlan, comm: Comm) -> Tensor:
    """Return all features of this rank's inner tokens from features in the residual layout, as heads_plan.py says.

    `plan` is the mode's `expand` without axes of size 1.
    """
    if not (plan.k or plan.n):
        return x_MR.contiguous()  # not a view that keeps all latents
    whole_MR: Tensor = _WholeFeatures.apply(x_MR, plan, comm)
    return whole_MR


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MR: Tensor, plan: MatmulPlan, comm: Comm) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        whole = gather(x_MR, plan.x, X_DIMS, comm).wait()
        whole = comm.all_gather(whole, plan.k, 1).wait() if plan.k else whole
        return _own(whole, row_axes(plan), 0, comm).contiguous()

    @staticmethod
    def backward(ctx: Any, dy_MR: Tensor) -> tuple[Tensor, None, None]:
        plan, comm, rows = ctx.plan, ctx.comm, row_axes(ctx.plan)
        grad = comm.all_gather(dy_MR.contiguous(), rows, 0).wait() if rows else dy_MR
        for axes, dim in moves(plan.y):
            splits_heads = dim == "N"
            grad = comm.reduce_scatter(grad, axes, 1).wait() if splits_heads else _own(grad, axes, 1, comm)
        grad = grad.clone(memory_format=torch.contiguous_format)  # a reduction may work in place
        return reduce(grad, plan.dx_moves, X_DIMS, comm).wait(), None, None


def _own(x: Tensor, axes: Axes, dim: int, comm: Comm) -> Tensor:
    """Return this rank's part of a dim that `axes` split."""
    return x.chunk(comm.mesh.size(axes), dim)[comm.mesh.index(axes)] if axes else x


def whole_weight(w_FH: Tensor, plan: MatmulPlan, comm: Comm) -> Tensor:
    """Return the rows of this rank's heads of an `expand` weight, with all inputs; without gradient."""
    whole = gather(w_FH.detach(), plan.w, W_DIMS, comm).wait()
    whole = comm.all_gather(whole, plan.k, 1).wait() if plan.k else whole
    return _own(whole, tuple(axis for axis, dim in plan.y.items() if dim == "N"), 0, comm)


def padded(x: Tensor, size: int) -> Tensor:
    """Return x [..., D] with zeros behind its features, so that kernels see heads of one size."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def absorbed_attention(
    queries: tuple[Tensor, Tensor], latents_BLR: Tensor, weights: tuple[Tensor, Tensor], mask_BSL: Tensor, scale: float
) -> Tensor:
    """Return attention [B, S, N, D] to cached latents, with the up projections absorbed in queries and output.

        score = (W_k^T q) c + q_pos k_pos        output = W_v (sum of weights c)

    Args:
        queries: those without positions [B, S, N, D], and rotated ones [B, S, N, P].
        latents_BLR: latents c of keys and values, then the rotary key of P features.
        weights: of keys and of values, each [N, D, R] with the features of c.
        mask_BSL: True where a query sees a position of the cache.
    """
    (q, q_pos), (w_k, w_v) = queries, weights
    q_BSNR = torch.cat((torch.einsum("bsnd,ndr->bsnr", q, w_k), q_pos), dim=-1)
    keys, values = latents_BLR.unsqueeze(1), latents_BLR[..., : w_v.shape[-1]].unsqueeze(1)
    y_BNSR = F.scaled_dot_product_attention(
        q_BSNR.transpose(1, 2), keys, values, mask_BSL.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return torch.einsum("bnsr,ndr->bsnd", y_BNSR, w_v)
