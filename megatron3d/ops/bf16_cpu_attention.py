"""Causal attention in bf16 on CPUs: torch's fused kernel forward, matrix products backward.

The fused backward multiplies small blocks, for which bf16 units are slow.  Up to 512 positions it is 1.2 to 2.3 times
faster to compute softmax(q k^T) again and to multiply whole matrices, a few sequences at a time.  Scores are rounded to
bf16 before the softmax, as they are in attention that is not fused.  In fp32 and for longer sequences the fused kernel
is faster.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
