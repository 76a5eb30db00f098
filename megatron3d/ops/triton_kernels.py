"""Triton kernels: the fused cross-entropy and norms over sharded features, a program per token; and dropout masks.

`ops/cross_entropy.py` and `ops/norm.py` have the equations, `ops/dropout.py` the hash.  This module needs the triton
package; it is imported where the kernels run.
Letters: M tokens (rows), H this rank's features (columns), R ranks, G groups of tokens, C tokens of a chunk of loss
or, of a norm, 2 with a mean (LayerNorm) and 1 without; V this rank's vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, MASK_BLOCK = 4096, 1024
TILE_ROWS, TILE_COLUMNS = 16, 128
MAX_GROUPS = 128
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
MASK_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def vocab_statistics_kernel(logits, columns, statistics, num_tokens, vocab, row_stride, BLOCK: tl.constexpr):
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
def logits_grad_kernel(logits, columns, factors, grad, num_tokens, vocab, row_stride, grad_stride, BLOCK: tl.constexpr):
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


def write_vocab_statistics(logits_CV: Tensor, column_C: Tensor, statistics_3C: Tensor) -> None:
    """Write maximum, sum of exponentials and label's logit of every token; its column is -1 in another shard."""
    num_tokens, vocab = logits_CV.shape
    if num_tokens:
        vocab_statistics_kernel[(num_tokens,)](
            logits_CV, column_C, statistics_3C, num_tokens, vocab, logits_CV.stride(0), BLOCK, **OPTIONS
        )


def write_logits_grad(logits_CV: Tensor, column_C: Tensor, factors_3C: Tensor, grad_CV: Tensor) -> None:
    """Write the gradient; `factors_3C` holds maximum, factor of the exponentials, and what the label's column loses."""
    num_tokens, vocab = logits_CV.shape
    strides = logits_CV.stride(0), grad_CV.stride(0)
    if num_tokens:
        logits_grad_kernel[(num_tokens,)](
            logits_CV, column_C, factors_3C, grad_CV, num_tokens, vocab, *strides, BLOCK, **OPTIONS
        )


@triton.jit
def mask_kernel(rows, columns, keep, least, num_columns, BLOCK: tl.constexpr):
    """Write one block of a row of the mask from the hashes of row and columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < num_columns
    x = tl.load(rows + row) + tl.load(columns + column, mask=is_here, other=0)
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    x = (x ^ (x >> 31)) & (0xFFFFFF << 20)
    tl.store(keep + row * num_columns + column, (x >= least).to(tl.int8), mask=is_here)


def write_mask(rows_M: Tensor, columns_H: Tensor, least: int, keep_MH: Tensor) -> None:
    """Write where the hash of hashed row and column, both int64, is at least `least`."""
    num_rows, num_columns = keep_MH.shape
    if keep_MH.numel():
        grid = num_rows, triton.cdiv(num_columns, MASK_BLOCK)
        mask_kernel[grid](rows_M, columns_H, keep_MH.view(torch.int8), least, num_columns, MASK_BLOCK, **MASK_OPTIONS)


@triton.jit
def norm_statistics_kernel(x, statistics, num_tokens, features, row_stride, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean square of one token's features, or their mean and the mean square about it."""
    token = tl.program_id(0).to(tl.int64)
    row = x + token * row_stride
    mean = tl.full((), 0.0, tl.float32)
    if CENTRED:
        for start in range(0, features, BLOCK):
            place = start + tl.arange(0, BLOCK)
            mean += tl.sum(tl.load(row + place, mask=place < features, other=0.0).to(tl.float32), 0)
        mean = mean / features
        tl.store(statistics + token, mean)
    square = tl.full((), 0.0, tl.float32)
    for start in range(0, features, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(row + place, mask=place < features, other=0.0).to(tl.float32)
        values = tl.where(place < features, values - mean, 0.0)
        square += tl.sum(values * values, 0)
    tl.store(statistics + CENTRED * num_tokens + token, square / features)


@triton.jit
def normalize_kernel(
    x, statistics, weight, bias, y, mean_scale, num_tokens, features, ranks, eps, x_stride, y_stride,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the ranks' statistics of one token, write mean and scale, and normalize its features."""
    token = tl.program_id(0).to(tl.int64)
    mean = tl.full((), 0.0, tl.float32)
    square = tl.full((), 0.0, tl.float32)
    if CENTRED:
        for rank in range(ranks):
            mean += tl.load(statistics + 2 * rank * num_tokens + token)
        mean = mean / ranks
        for rank in range(ranks):
            apart = tl.load(statistics + 2 * rank * num_tokens + token) - mean
            square += tl.load(statistics + (2 * rank + 1) * num_tokens + token) + apart * apart
        tl.store(mean_scale + token, mean)
    else:
        square = tl.load(statistics + token)
    scale = 1.0 / tl.sqrt_rn(square / ranks + eps)
    tl.store(mean_scale + CENTRED * num_tokens + token, scale)
    for start in range(0, features, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_here = place < features
        values = tl.load(x + token * x_stride + place, mask=is_here, other=0.0).to(tl.float32)
        values = (values - mean) * scale * tl.load(weight + place, mask=is_here, other=0.0).to(tl.float32)
        if CENTRED:
            values += tl.load(bias + place, mask=is_here, other=0.0).to(tl.float32)
        tl.store(y + token * y_stride + place, values.to(y.dtype.element_ty), mask=is_here)


@triton.jit
def sums_kernel(
    x, dy, weight, mean_scale, sums, num_tokens, features, x_stride, dy_stride,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of gradient times normalized feature of one token, and with a mean also that of the gradient."""
    token = tl.program_id(0).to(tl.int64)
    mean = tl.full((), 0.0, tl.float32)
    if CENTRED:
        mean = tl.load(mean_scale + token)
    scale = tl.load(mean_scale + CENTRED * num_tokens + token)
    product = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, features, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_here = place < features
        unit = (tl.load(x + token * x_stride + place, mask=is_here, other=0.0).to(tl.float32) - mean) * scale
        grad = tl.load(dy + token * dy_stride + place, mask=is_here, other=0.0).to(tl.float32)
        grad = grad * tl.load(weight + place, mask=is_here, other=0.0).to(tl.float32)
        product += tl.sum(grad * unit, 0)
        total += tl.sum(grad, 0)
    tl.store(sums + token, product)
    if CENTRED:
        tl.store(sums + num_tokens + token, total)


@triton.jit
def weight_grads_kernel(
    x, dy, mean_scale, partial, num_tokens, features, group_tokens, x_stride, dy_stride,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one group of tokens' sums of dy times normalized feature, and with a bias also those of dy."""
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1).to(tl.int64)
    is_here = (place < features)[None, :]
    end = tl.minimum((group + 1) * group_tokens, num_tokens)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(group * group_tokens, end, ROWS):
        token = start + tl.arange(0, ROWS).to(tl.int64)
        is_token = token < end
        mask = is_token[:, None] & is_here
        unit = tl.load(x + token[:, None] * x_stride + place[None, :], mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            unit -= tl.load(mean_scale + token, mask=is_token, other=0.0)[:, None]
        unit *= tl.load(mean_scale + CENTRED * num_tokens + token, mask=is_token, other=0.0)[:, None]
        grad = tl.load(dy + token[:, None] * dy_stride + place[None, :], mask=mask, other=0.0).to(tl.float32)
        products += grad * unit
        totals += grad
    out = partial + group * features + place
    tl.store(out, tl.sum(products, 0), mask=place < features)
    if CENTRED:
        tl.store(out + tl.num_programs(1) * features, tl.sum(totals, 0), mask=place < features)


@triton.jit
def input_grad_kernel(
    x, dy, weight, mean_scale, sums, dx, num_tokens, features, all_features, x_stride, dy_stride, dx_stride,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one token's features from the sums over all of them."""
    token = tl.program_id(0).to(tl.int64)
    mean = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if CENTRED:
        mean = tl.load(mean_scale + token)
        total = tl.load(sums + num_tokens + token) / all_features
    scale = tl.load(mean_scale + CENTRED * num_tokens + token)
    product = tl.load(sums + token) / all_features
    for start in range(0, features, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_here = place < features
        unit = (tl.load(x + token * x_stride + place, mask=is_here, other=0.0).to(tl.float32) - mean) * scale
        grad = tl.load(dy + token * dy_stride + place, mask=is_here, other=0.0).to(tl.float32)
        grad = grad * tl.load(weight + place, mask=is_here, other=0.0).to(tl.float32)
        values = (grad - unit * product - total) * scale
        tl.store(dx + token * dx_stride + place, values.to(dx.dtype.element_ty), mask=is_here)


def _block(features: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(features)))


def write_norm_statistics(x_MH: Tensor, statistics_CM: Tensor) -> None:
    """Write each token's mean square, or its mean and the mean square about it."""
    num_tokens, features = x_MH.shape
    if num_tokens:
        centred = len(statistics_CM) - 1
        norm_statistics_kernel[(num_tokens,)](
            x_MH, statistics_CM, num_tokens, features, x_MH.stride(0), centred, _block(features), **OPTIONS
        )


def write_normalized(
    x_MH: Tensor,
    statistics_RCM: Tensor,
    weight_bias: tuple[Tensor, Tensor | None],
    eps: float,
    ranks: int,
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Write Y [M, H] and the combined mean and scale [C, M]; without a mean, statistics are sums over the ranks."""
    (weight_H, bias_H), (y_MH, mean_scale_CM), (num_tokens, features) = weight_bias, outputs, x_MH.shape
    if num_tokens:
        normalize_kernel[(num_tokens,)](
            x_MH, statistics_RCM, weight_H, weight_H if bias_H is None else bias_H, y_MH, mean_scale_CM, num_tokens,
            features, ranks, eps, x_MH.stride(0), y_MH.stride(0), len(mean_scale_CM) - 1, _block(features), **OPTIONS,
        )  # fmt: skip


def write_sums(x_MH: Tensor, dy_MH: Tensor, weight_H: Tensor, mean_scale_CM: Tensor, sums_CM: Tensor) -> None:
    """Write this rank's sums of gradient times normalized feature, and with a mean those of the gradient."""
    num_tokens, features = x_MH.shape
    if num_tokens:
        sums_kernel[(num_tokens,)](
            x_MH, dy_MH, weight_H, mean_scale_CM, sums_CM, num_tokens, features, x_MH.stride(0), dy_MH.stride(0),
            len(sums_CM) - 1, _block(features), **OPTIONS,
        )  # fmt: skip


def weight_grads(x_MH: Tensor, dy_MH: Tensor, mean_scale_CM: Tensor) -> Tensor:
    """Return the gradient of the weight, and with a mean that of the bias, as sums of groups of tokens [C, G, H]."""
    num_tokens, features = x_MH.shape
    group_tokens = TILE_ROWS * triton.cdiv(num_tokens, TILE_ROWS * MAX_GROUPS)
    groups, centred = triton.cdiv(num_tokens, group_tokens) if num_tokens else 0, len(mean_scale_CM) - 1
    partial_CGH = x_MH.new_empty((1 + centred, groups, features), dtype=torch.float32)
    if num_tokens:
        weight_grads_kernel[(triton.cdiv(features, TILE_COLUMNS), groups)](
            x_MH, dy_MH, mean_scale_CM, partial_CGH, num_tokens, features, group_tokens, x_MH.stride(0),
            dy_MH.stride(0), centred, TILE_ROWS, TILE_COLUMNS, **OPTIONS,
        )  # fmt: skip
    return partial_CGH


def write_input_grad(
    x_MH: Tensor, dy_MH: Tensor, weight_H: Tensor, mean_scale_CM: Tensor, sums_CM: Tensor, dx_MH: Tensor, *, ranks: int
) -> None:
    """Write dX from the sums over all features, which `ranks` ranks hold."""
    num_tokens, features = x_MH.shape
    if num_tokens:
        input_grad_kernel[(num_tokens,)](
            x_MH, dy_MH, weight_H, mean_scale_CM, sums_CM, dx_MH, num_tokens, features, ranks * features,
            x_MH.stride(0), dy_MH.stride(0), dx_MH.stride(0), len(sums_CM) - 1, _block(features), **OPTIONS,
        )  # fmt: skip
