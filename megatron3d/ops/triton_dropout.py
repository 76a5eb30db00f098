"""Dropout masks as one Triton kernel; `ops/dropout.py` has the hash.

This module needs the triton package; it is imported where the kernel runs.
Letters: M rows (tokens), H columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


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
        grid = num_rows, triton.cdiv(num_columns, BLOCK)
        mask_kernel[grid](rows_M, columns_H, keep_MH.view(torch.int8), least, num_columns, BLOCK, **OPTIONS)
