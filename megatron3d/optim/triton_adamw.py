"""AdamW with moments in fp32 or bf16 as one Triton kernel; `update_chunked` is the reference and has the equations.

This module needs the triton package; it is imported where the kernel runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
# No fused multiply-add, so that the rounding is that of torch's operations one by one.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def adamw_kernel(
    grads, mains, exp_avgs, exp_avg_sqs, scalars, salt, numel, decay, beta1, beta2, eps, FIRST_IS_BF16: tl.constexpr,
    SECOND_IS_BF16: tl.constexpr, SCALES_GRADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block; bf16 moments come as int16.

    `scalars`: corrected rate, second correction, skipped, and the factor of the gradients.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_here = place < numel
    rate, correction = tl.load(scalars), tl.load(scalars + 1)
    is_updated = place < tl.where(tl.load(scalars + 2) == 0.0, numel, 0)
    g = tl.load(grads + place, mask=is_here, other=0.0)
    if SCALES_GRADS:
        g = g * tl.load(scalars + 3)
        tl.store(grads + place, g, mask=is_updated)
    w = tl.load(mains + place, mask=is_here, other=0.0)
    x = (w.to(tl.uint32, bitcast=True) & 0xFFFF0000) | (g.to(tl.uint32, bitcast=True) >> 16)
    x = x + tl.load(salt).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    noise = x ^ (x >> 16)
    m = tl.load(exp_avgs + place, mask=is_here, other=0)
    if FIRST_IS_BF16:
        m = (m.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    v = tl.load(exp_avg_sqs + place, mask=is_here, other=0)
    if SECOND_IS_BF16:
        v = (v.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    m = m + (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * (g * g)
    root = tl.sqrt_rn(v / correction) + eps
    tl.store(mains + place, w * decay - m * rate / root, mask=is_updated)
    if FIRST_IS_BF16:
        bits = m.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
        tl.store(exp_avgs + place, (bits >> 16).to(tl.int16), mask=is_updated)
    else:
        tl.store(exp_avgs + place, m, mask=is_updated)
    if SECOND_IS_BF16:
        bits = v.to(tl.uint32, bitcast=True) + (noise >> 16)
        tl.store(exp_avg_sqs + place, (bits >> 16).to(tl.int16), mask=is_updated)
    else:
        tl.store(exp_avg_sqs + place, v, mask=is_updated)


def update_tensor(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    scalars: Tensor,
    salt: Tensor,
    factors: tuple[float, float, float, float],
    *,
    scales_grads: bool,
) -> None:
    """Update flat fp32 weights and their moments.

    Args:
        tensors: gradients, weights, first and second moments.
        scalars: fp32, corrected learning rate, correction of the second moment, 0 unless the update is skipped, and
            the factor of the gradients.
        factors: factor of the weights by weight decay, beta1, beta2 and eps.
        scales_grads: the gradients are multiplied by their factor.
    """
    g, w, *moments = tensors
    is_bf16 = [moment.dtype == torch.bfloat16 for moment in moments]
    m, v = (t.view(torch.int16) if narrow else t for t, narrow in zip(moments, is_bf16, strict=True))
    if numel := w.numel():
        grid = (triton.cdiv(numel, BLOCK),)
        adamw_kernel[grid](g, w, m, v, scalars, salt, numel, *factors, *is_bf16, scales_grads, BLOCK, **OPTIONS)
