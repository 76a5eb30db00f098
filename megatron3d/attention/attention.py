"""Causal attention over this rank's heads with grouped queries (Ainslie et al. 2023, arXiv:2305.13245), and to latents.

Where there are fewer key/value heads than ranks that shard the query heads, their weights are sharded inside a head,
and keys and values are all-gathered over the fewest (fastest) axes that make the needed heads whole.

In bf16 on CPUs torch's fused backward multiplies small blocks, for which bf16 units are slow.  Up to 512 positions it
is 1.2 to 2.3 times faster to compute softmax(q k^T) again and to multiply whole matrices, a few sequences at a time.
Scores are rounded to bf16 before the softmax, as in attention that is not fused.

Letters: M tokens, B sequences, S positions, L positions in a KV cache, N query heads, G key/value heads, D features of
a head, R features of latents, H inputs and F outputs of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.attention.packed import Visible, packed_attention, positions_of
from megatron3d.attention.pairs import (
    PLAIN_SOFTMAX,
    Drop,
    InPieces,
    PairInputs,
    PlainKernel,
    Softmax,
    WideMatmul,
    add_sink,
    capped,
)
from megatron3d.attention.plan import DROPOUT_PIECE, DROPOUT_ROWS, LONGEST, HeadSplit, row_axes
from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import W_DIMS, X_DIMS, gather, reduce
from megatron3d.ops.dropout import dropout
from megatron3d.ops.recompute import recomputed
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import Axes

MAX_SEQ_LENGTH = 512
_CHUNK = 2**20  # scores computed at once, 2 MB, which caches hold


def recomputes_softmax(device_type: str, dtype: torch.dtype, seq_length: int) -> bool:
    """Return whether this attention is used for sequences of this length."""
    return device_type == "cpu" and dtype == torch.bfloat16 and seq_length <= MAX_SEQ_LENGTH


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [B, N, S, D] of q [B, N, S, D] with k and v [B, G, S, D], each for N / G query heads."""
    out: Tensor = _CausalAttention.apply(q, k, v)
    return out


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        _, num_heads, seq, _ = q.shape
        step = max(1, _CHUNK // (num_heads * seq * seq))
        later = q.new_full((seq, seq), -math.inf).triu_(1)
        chunks = zip(*(t.split(step) for t in (q, k, v, dy)), strict=True)
        parts = [_backward(q, k, v, dy, later) for q, k, v, dy in chunks]
        dq, dk, dv = (torch.cat(grads) if len(parts) > 1 else grads[0] for grads in zip(*parts, strict=True))
        return dq, dk, dv


def _backward(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, later: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for a few sequences; `later` [S, S] is -inf where a key is later."""
    batch, num_groups, seq, size = k.shape
    shared, scale = q.shape[1] // num_groups, size**-0.5
    by_head = [t if t is q or t is dy or shared == 1 else t.repeat_interleave(shared, 1) for t in (q, k, v, dy)]
    q, k, v, dy = (t.reshape(-1, seq, size) for t in by_head)
    weights = torch.baddbmm(later, q, k.mT, alpha=scale).softmax(-1)
    dscores = torch._softmax_backward_data(dy @ v.mT, weights, -1, q.dtype)
    dq, dk, dv = (dscores @ k).mul_(scale), (dscores.mT @ q).mul_(scale), weights.mT @ dy
    dk, dv = (t.view(batch, num_groups, shared, seq, size).sum(2) if shared > 1 else t for t in (dk, dv))
    return tuple(t.view(batch, -1, seq, size) for t in (dq, dk, dv))  # type: ignore[return-value]


Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AttentionHeads(HeadSplit):
    """Attention heads of one rank, as slices of the fused qkv projection."""

    comm: Comm

    def split(
        self, qkv_MF: Tensor, seq_length: int, norms: tuple[Norm, Norm] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, S, N, D], k and v [B, S, G, D] with whole heads, from this rank's shard of the fused qkv.

        `norms` normalize this rank's features of queries and of keys, before heads are made whole.
        """
        queries = (self.query_span[1] - self.query_span[0]) * self.size
        width = (qkv_MF.shape[1] - queries) // 2
        q, k, v = qkv_MF.split((queries, width, width), dim=1)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        if self.gather_axes:
            k, v = self._whole(k), self._whole(v)
        q, k, v = (t.view(-1, seq_length, t.shape[1] // self.size, self.size) for t in (q, k, v))
        return q, k, v

    def _whole(self, kv_MF: Tensor) -> Tensor:
        kept = self.axes[: len(self.axes) - len(self.gather_axes)]
        low, _ = span(self.num_groups * self.size, kept, self.comm.mesh)
        first, last = (group * self.size - low for group in self.group_span)
        whole: Tensor = _GatherColumns.apply(kv_MF, self.gather_axes, self.comm)
        return whole[:, first:last]


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, axes: Axes, comm: Comm) -> Tensor:
        ctx.axes, ctx.comm = axes, comm
        whole_MF = comm.all_gather(x_MF, axes, dim=1).wait()
        return whole_MF.contiguous()  # one column per rank gives a view that no fused kernel accepts

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(dy_MF, ctx.axes, dim=1).wait(), None, None


def attention(
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    heads: AttentionHeads,
    drop: Drop | None,
    mask_BST: Tensor | None = None,
    *,
    visible: Visible | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Return causal attention, [M, N * D].

    Args:
        drop: dropout of the attention weights.
        mask_BST: True where a query sees one of T key positions, of a KV cache; default: causal.
        visible: documents and window of the sequences; default: none.
        softmax: how scores become weights.
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BSND, k_BSGD, v_BSGD))
    if not heads.are_even:
        k, v = (t[:, heads.group_of_query] for t in (k, v))
    if drop is not None:
        y = attention_with_dropout(q, k, v, WeightDropout(drop, heads, q.shape[2], visible or Visible(), softmax))
    elif mask_BST is not None and not softmax.is_vanilla:
        y = masked_attention(q, k, v, mask_BST, softmax)
    elif visible is not None or not softmax.is_vanilla:
        y = packed_attention(q, k, v, visible or Visible(), softmax)
    elif mask_BST is None and recomputes_softmax(q.device.type, q.dtype, q.shape[2]):
        y = causal_attention(q, k, v)
    else:
        mask, is_grouped = None if mask_BST is None else mask_BST.unsqueeze(1), q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=is_grouped)
    batch, num_heads, seq, size = y.shape
    return y.transpose(1, 2).reshape(batch * seq, num_heads * size)


# Scores of a KV cache that are in memory at once, 1 GiB in fp32.
_SCORES_AT_ONCE = 2**28


def masked_attention(
    q_BNSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask_BST: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    scale: float | None = None,
) -> Tensor:
    """Return attention [B, N, S, D] of queries to the keys of a KV cache that they see; heads share keys uncopied.

    `scale` is the factor of the scores; None: that of the size of a head.
    """
    by_size = _SCORES_AT_ONCE // (q_BNSD.shape[0] * q_BNSD.shape[1] * k_BGTD.shape[2])
    longest = min(max(by_size, 1), LONGEST)
    kernel = InPieces(PlainKernel(softmax.softcap, scale=scale), longest)
    out, lse = kernel.forward(PairInputs(q_BNSD, k_BGTD, v_BGTD, False, mask_BST[:, None, None]))
    return add_sink(out, lse, softmax.sink_N)[0]


class WeightDropout(NamedTuple):
    """Dropout of attention weights with the heads, positions, documents and softmax that it is for."""

    drop: Drop
    heads: AttentionHeads
    seq_length: int
    visible: Visible
    softmax: Softmax = PLAIN_SOFTMAX

    def keep(self, batch: int, queries: Sequence[int], num_keys: int, device: torch.device) -> Tensor:
        """Return bool [B, N, L, T] for queries at these positions and the first keys, the same in every layout."""
        places, keys = positions_of(queries, device), torch.arange(num_keys, device=device)
        heads = self.heads
        return self.drop.keep((0, batch), (heads.query_span, heads.num_heads), self.seq_length, places, keys)


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, at: WeightDropout, chunks: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """Return attention with dropout from plain matmuls, since the masks of torch's kernels depend on the layout.

    The queries are at the half-open ranges `chunks` of positions; default: all.  Of sequences longer than
    `DROPOUT_ROWS`, pieces of the queries are computed, and recomputed in backward.
    """
    seq, row, parts = at.seq_length, 0, []
    chunks = ((0, seq),) if chunks is None else chunks
    if seq <= DROPOUT_ROWS:
        positions = [position for chunk in chunks for position in range(*chunk)]
        return piece_with_dropout(q, k, v, positions, at)
    pieces = [(low, min(low + DROPOUT_PIECE, end)) for first, end in chunks for low in range(first, end, DROPOUT_PIECE)]
    for low, high in pieces:
        queries = q[:, :, row : row + high - low]
        parts.append(recomputed(piece_with_dropout, queries, k[:, :, :high], v[:, :, :high], range(low, high), at))
        row += high - low
    return torch.cat(parts, dim=2)


def piece_with_dropout(q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], at: WeightDropout) -> Tensor:
    """Return attention [B, N, L, D] of the queries at these positions to the first T keys."""
    (batch, num_heads, _, size), num_keys = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (k, v))
    scores: Tensor = WideMatmul.apply(q, k.mT) * size**-0.5
    rows = range(batch if at.visible.starts else 1)
    see = torch.stack([at.visible.mask(row, queries, range(num_keys), q.device) for row in rows])
    scores = capped(scores, at.softmax.softcap).masked_fill(see.logical_not_().unsqueeze(1), float("-inf"))
    if at.softmax.sink_N is None:
        weights = scores.softmax(-1)
    else:
        sinks = at.softmax.sink_N.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    weights = weights.to(q.dtype)
    keep = at.keep(batch, queries, num_keys, q.device)
    return dropout(weights, keep, at.drop.rate) @ v


# Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) on shards.


def whole_features(x_MR: Tensor, plan: MatmulPlan, comm: Comm) -> Tensor:
    """Return all features of this rank's inner tokens from features in the residual layout, as plan.py says.

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
    queries: tuple[Tensor, Tensor],
    latents_BLR: Tensor,
    weights: tuple[Tensor, Tensor],
    mask_BSL: Tensor,
    scale: float,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Return attention [B, S, N, D] to cached latents, with the up projections absorbed in queries and output.

        score = (W_k^T q) c + q_pos k_pos        output = W_v (sum of weights c)

    All heads read the one latent of a position, so they are rows of one matmul; torch's fused attention would copy the
    cache once for each head.

    Args:
        queries: those without positions [B, S, N, D], and rotated ones [B, S, N, P].
        latents_BLR: latents c of keys and values, then the rotary key of P features.
        weights: of keys and of values, each [N, D, R] with the features of c.
        mask_BSL: True where a query sees a position of the cache.
    """
    (q, q_pos), (w_k, w_v) = queries, weights
    q_BSNR = torch.cat((torch.einsum("bsnd,ndr->bsnr", q, w_k), q_pos), dim=-1)
    keys, values = latents_BLR.unsqueeze(1), latents_BLR[..., : w_v.shape[-1]].unsqueeze(1)
    y_BNSR = masked_attention(q_BSNR.transpose(1, 2), keys, values, mask_BSL, softmax, scale)
    return torch.einsum("bnsr,ndr->bsnd", y_BNSR, w_v)
