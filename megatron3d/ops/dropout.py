"""Dropout whose mask is a function of (seed, iteration, site, global element index), equal in every layout.

An element's index is its row and column; their hashes are added and hashed again, with the multipliers and shifts of
splitmix64's finalizer (Steele, Lea and Flood 2014; here the shifts keep the sign).
Letters: M rows (tokens), H columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_BITS = 24


def keep_mask(key: int, rows_M: Tensor, columns_H: Tensor, rate: float) -> Tensor:
    """Return bool [M, H], False with probability `rate`; int64 `rows_M` and `columns_H` are global indices."""
    mixed = _mix(_mix(rows_M + key).unsqueeze(-1) + _mix(columns_H - key))
    return (mixed >> 20) & ((1 << _BITS) - 1) >= int(rate * (1 << _BITS))


def dropout(x_MH: Tensor, keep_MH: Tensor, rate: float) -> Tensor:
    """Return x / (1 - rate) where `keep_MH`, else 0."""
    y_MH: Tensor = _Dropout.apply(x_MH, keep_MH, 1.0 / (1.0 - rate))
    return y_MH


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30)) * _MULTIPLIERS[0]
    x = (x ^ (x >> 27)) * _MULTIPLIERS[1]
    return x ^ (x >> 31)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, keep_MH: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(keep_MH)
        return x_MH * keep_MH * scale

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        (keep_MH,) = ctx.saved_tensors
        return dy_MH * keep_MH * ctx.scale, None, None
