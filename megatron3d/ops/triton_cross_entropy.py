"""Triton kernels of the fused cross-entropy: one program per token.  `ops/cross_entropy.py` has the equations.

This module needs the triton package; it is imported where the kernels run.
Letters: C tokens of one chunk, V this rank's vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def statistics_kernel(logits, columns, statistics, num_tokens, vocab, row_stride, BLOCK: tl.constexpr):
    """Write maximum, sum of exponentials relative to it, and the label's logit of one token."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(row + place, mask=place < vocab, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(values, 0))
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)  # a shard that only holds padding
        total = total * tl.exp(top - finite_top) + tl.sum(tl.exp(values - finite_top), 0)
        top = new_top
    column = tl.load(columns + token)
    label = tl.load(row + column, mask=column >= 0, other=0.0)
    tl.store(statistics + token, top)
    tl.store(statistics + num_tokens + token, total)
    tl.store(statistics + 2 * num_tokens + token, label)


@triton.jit
def gradient_kernel(logits, columns, factors, grad, num_tokens, vocab, row_stride, grad_stride, BLOCK: tl.constexpr):
    """Write the gradient of one token, whose memory may be that of its logits.

    The barrier keeps a warp from overwriting logits that another one has yet to read: a narrow gradient of block b lies
    on logits of block b / 2, and those of block 0 on themselves.
    """
    token = tl.program_id(0).to(tl.int64)
    row, grad_row = logits + token * row_stride, grad + token * grad_stride
    column = tl.load(columns + token)
    top = tl.load(factors + token)
    factor = tl.load(factors + num_tokens + token)
    label_factor = tl.load(factors + 2 * num_tokens + token)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(row + place, mask=place < vocab, other=-float("inf"))
        values = tl.exp(values - top) * factor
        values = tl.where(place == column, values - label_factor, values)
        tl.debug_barrier()
        tl.store(grad_row + place, values.to(grad.dtype.element_ty), mask=place < vocab)


def write_statistics(logits_CV: Tensor, column_C: Tensor, statistics_3C: Tensor) -> None:
    """Write maximum, sum of exponentials and label's logit of every token; its column is -1 in another shard."""
    num_tokens, vocab = logits_CV.shape
    if num_tokens:
        statistics_kernel[(num_tokens,)](
            logits_CV, column_C, statistics_3C, num_tokens, vocab, logits_CV.stride(0), BLOCK, **OPTIONS
        )


def write_gradient(logits_CV: Tensor, column_C: Tensor, factors_3C: Tensor, grad_CV: Tensor) -> None:
    """Write the gradient; `factors_3C` holds maximum, factor of the exponentials, and what the label's column loses."""
    num_tokens, vocab = logits_CV.shape
    strides = logits_CV.stride(0), grad_CV.stride(0)
    if num_tokens:
        gradient_kernel[(num_tokens,)](
            logits_CV, column_C, factors_3C, grad_CV, num_tokens, vocab, *strides, BLOCK, **OPTIONS
        )
