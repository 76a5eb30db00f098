"""Triton kernel that quantizes a tensor to fp8, with its transpose, in one pass; a program per tile of 128 x 128.

`linear/fp8.py` has the equations and the plain form, whose bits these are; scales are powers of 2.  This module needs
the triton package; it is imported where the kernel runs.
Letters: M rows, K columns of the tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron3d.linear.fp8_plan import Blocks

TILE = 128
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _codes(values, LARGEST_EXPONENT: tl.constexpr):
    """Return values, which the format holds, as its bytes: rounded to nearest, ties to even.

    Subnormals are rounded by an addition to a number whose last place is theirs.  Triton's own conversion is not used:
    its interpreter loses the carry into the exponent, and GPUs before Ada have none.
    """
    IS_E4M3: tl.constexpr = LARGEST_EXPONENT == 8
    BITS: tl.constexpr = 20 if IS_E4M3 else 21  # of fp32's mantissa that the format does not have
    BIAS: tl.constexpr = 120 if IS_E4M3 else 112  # of fp32 above the format's
    PLACE: tl.constexpr = 16384.0 if IS_E4M3 else 128.0
    PLACE_BITS: tl.constexpr = 0x46800000 if IS_E4M3 else 0x43000000
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + (((size >> BITS) & 1) + ((1 << (BITS - 1)) - 1))) >> BITS) - (BIAS << (23 - BITS))
    subnormal = (size.to(tl.float32, bitcast=True) + PLACE).to(tl.int32, bitcast=True) - PLACE_BITS
    code = tl.where(size < ((BIAS + 1) << 23), subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantized(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    """Return values times the power of 2 of their block as fp8, and the exponents that restore them, 128 as NaN.

    Bits without the sign are in the order of absolute values, NaN last.
    """
    size = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF).reshape(TILE // ROWS, ROWS, TILE // COLUMNS, COLUMNS)
    largest = tl.maximum(tl.max(tl.max(size, 3), 1), 17 << 23)  # 2^-110
    exceeds = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = (largest >> 23) - 127 + exceeds - LARGEST_EXPONENT
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    in_blocks = values.reshape(TILE // ROWS, ROWS, TILE // COLUMNS, COLUMNS) * factor[:, None, :, None]
    return _codes(in_blocks.reshape(TILE, TILE), LARGEST_EXPONENT), tl.where(largest < 0x7F800000, exponent, 128)


@triton.jit
def _store_scales(scales, places, exponents, is_here, IS_BYTE: tl.constexpr):
    """Write powers of 2 as fp32, or their exponents as bytes of e8m0; NaN where 128."""
    if IS_BYTE:
        tl.store(scales + places, (exponents + 127).to(tl.uint8), mask=is_here)
    else:
        bits = tl.where(exponents == 128, 0x7FC00000, (exponents + 127) << 23)
        tl.store(scales + places, bits.to(tl.float32, bitcast=True), mask=is_here)


@triton.jit
def quantize_kernel(
    x, x_scales, data, scales, turned_data, turned_scales, num_rows, num_columns, x_stride,
    HAS_SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TURNED_ROWS: tl.constexpr, TURNED_COLUMNS: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr, IS_BYTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one tile of the form along the columns, and of that along the rows, transposed; ROWS 0: not that form.

    x may be fp8 itself, with scales of 1 x 128 blocks.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_here = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=is_here, other=0.0).to(tl.float32)
    if HAS_SCALES:
        of_row = row * (num_columns // TILE) + tl.program_id(1)
        values = values * tl.load(x_scales + of_row, mask=row < num_rows, other=1.0)[:, None]
    if ROWS > 0:
        codes, exponents = _quantized(values, ROWS, COLUMNS, TILE, LARGEST_EXPONENT)
        tl.store(data + row[:, None] * num_columns + column[None, :], codes, mask=is_here)
        block_row = tl.program_id(0).to(tl.int64) * (TILE // ROWS) + tl.arange(0, TILE // ROWS)
        block = tl.program_id(1) * (TILE // COLUMNS) + tl.arange(0, TILE // COLUMNS)
        per_row = num_columns // COLUMNS
        has_scale = (block_row * ROWS < num_rows)[:, None] & (block < per_row)[None, :]
        _store_scales(scales, block_row[:, None] * per_row + block[None, :], exponents, has_scale, IS_BYTE)
    if TURNED_ROWS > 0:
        codes, exponents = _quantized(values, TURNED_ROWS, TURNED_COLUMNS, TILE, LARGEST_EXPONENT)
        is_there = (column < num_columns)[:, None] & (row < num_rows)[None, :]
        tl.store(turned_data + column[:, None] * num_rows + row[None, :], tl.trans(codes), mask=is_there)
        block_row = tl.program_id(1).to(tl.int64) * (TILE // TURNED_COLUMNS) + tl.arange(0, TILE // TURNED_COLUMNS)
        block = tl.program_id(0) * (TILE // TURNED_ROWS) + tl.arange(0, TILE // TURNED_ROWS)
        per_row = num_rows // TURNED_ROWS
        has_scale = (block_row * TURNED_COLUMNS < num_columns)[:, None] & (block < per_row)[None, :]
        _store_scales(turned_scales, block_row[:, None] * per_row + block[None, :], tl.trans(exponents), has_scale,
                      IS_BYTE)  # fmt: skip


Form = tuple[Tensor, Tensor] | None


def quantize(
    x_MK: Tensor,
    fp8: torch.dtype,
    largest_exponent: int,
    scale_dtype: torch.dtype,
    blocks: Blocks,
    *,
    makes: tuple[bool, bool] = (True, True),
    scales: Tensor | None = None,
) -> tuple[Form, Form]:
    """Return data and scales of a tensor, and of its transpose, each in blocks along its own columns; None if not made.

    Args:
        x_MK: fp32, bf16 or fp16, or fp8 with `scales` of 1 x 128 blocks; rows are contiguous.
        largest_exponent: that of the end of `fp8`.
        makes: whether the tensor's form is made, and its transpose's.
    """
    (m, k), (rows, summed) = x_MK.shape, blocks
    straight, turned = (
        _empty(x_MK, *shape, blocks, fp8, scale_dtype) if is_made else None
        for shape, is_made in zip(((m, k), (k, m)), makes, strict=True)
    )
    outputs = [_bytes(t) for form in (straight, turned) for t in form or (x_MK, x_MK)]
    if x_MK.numel():
        quantize_kernel[triton.cdiv(m, TILE), triton.cdiv(k, TILE)](
            x_MK, x_MK if scales is None else scales, *outputs, m, k, x_MK.stride(0), scales is not None,
            rows if straight else 0, summed, summed if turned else 0, rows, largest_exponent,
            scale_dtype.itemsize == 1, TILE, **OPTIONS,
        )  # fmt: skip
    return straight, turned


def _empty(
    x_MK: Tensor, rows: int, summed: int, blocks: Blocks, fp8: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    assert blocks.rows and blocks.summed, "blocks have a size"
    scales = x_MK.new_empty(rows // blocks.rows, summed // blocks.summed, dtype=scale_dtype)
    return x_MK.new_empty(rows, summed, dtype=fp8), scales


def _bytes(t: Tensor) -> Tensor:
    """Return a tensor that is written byte by byte as bytes."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
