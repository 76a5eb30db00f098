"""Dropout whose mask is a function of (seed, iteration, site, global element index), equal in every layout.

An element's index is its row and column; their hashes are added and hashed again, with the multipliers and shifts of
splitmix64's finalizer (Steele, Lea and Flood 2014; here the shifts keep the sign).  On a GPU with Triton one kernel
writes the mask; otherwise rows are hashed in place, chunk by chunk, so that their numbers stay in a cache.
Letters: M rows (tokens), H columns.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from megatron3d.runtime.machine import has_triton


def derive_seed(*parts: int | str | tuple[int, ...]) -> int:
    """Return a 63-bit seed: of (seed, name, tile) for initial values, of (seed, iteration, site) for dropout."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Elements that are hashed at once; each needs two numbers of 8 bytes.
CPU_HASH_CHUNK, GPU_HASH_CHUNK = 2**16, 2**21
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
# These bits of the hash are compared with the rate.
_BITS, _FIRST_BIT = 24, 20


def keep_mask(key: int, rows_M: Tensor, columns_H: Tensor, rate: float) -> Tensor:
    """Return bool [M, H], False with probability `rate`; int64 `rows_M` and `columns_H` are global indices."""
    inputs = hash_inputs(key, rows_M, columns_H, rate)
    if not (rows_M.is_cuda and has_triton()):
        return mask_of(*inputs)
    from megatron3d.ops.triton_kernels import write_mask

    keep_MH = torch.empty((len(rows_M), len(columns_H)), dtype=torch.bool, device=rows_M.device)
    write_mask(*inputs, keep_MH)
    return keep_MH


def hash_inputs(key: int, rows_M: Tensor, columns_H: Tensor, rate: float) -> tuple[Tensor, Tensor, int]:
    """Return the hashes of rows and columns, and the least value of an element's hash that keeps it."""
    return _mix(rows_M + key), _mix(columns_H - key), int(rate * (1 << _BITS)) << _FIRST_BIT


def mask_of(hashed_M: Tensor, hashed_H: Tensor, least: int) -> Tensor:
    """Return the mask of hashed rows and columns by torch's operations, chunk by chunk."""
    keep_MH = torch.empty((len(hashed_M), len(hashed_H)), dtype=torch.bool, device=hashed_M.device)
    chunk = CPU_HASH_CHUNK if hashed_M.device.type == "cpu" else GPU_HASH_CHUNK
    num_rows = max(chunk // max(len(hashed_H), 1), 1)
    for some_M, some_MH in zip(hashed_M.split(num_rows), keep_MH.split(num_rows), strict=True):
        mixed = _mix_(some_M.unsqueeze(-1) + hashed_H)
        torch.ge(mixed.bitwise_and_(((1 << _BITS) - 1) << _FIRST_BIT), least, out=some_MH)
    return keep_MH


def dropout(x_MH: Tensor, keep_MH: Tensor, rate: float) -> Tensor:
    """Return x / (1 - rate) where `keep_MH`, else 0."""
    y_MH: Tensor = _Dropout.apply(x_MH, keep_MH, 1.0 / (1.0 - rate))
    return y_MH


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30)) * _MULTIPLIERS[0]
    x = (x ^ (x >> 27)) * _MULTIPLIERS[1]
    return x ^ (x >> 31)


def _mix_(x: Tensor) -> Tensor:
    """Hash in place, with one more tensor for the shifted numbers."""
    shifted = x >> 30
    x.bitwise_xor_(shifted).mul_(_MULTIPLIERS[0])
    x.bitwise_xor_(torch.bitwise_right_shift(x, 27, out=shifted)).mul_(_MULTIPLIERS[1])
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 31, out=shifted))


def _scaled(x_MH: Tensor, keep_MH: Tensor, scale: float) -> Tensor:
    """Return x times `scale` where it is kept, else 0; one kernel on a GPU, with the same rounding."""
    if x_MH.is_cuda:
        return torch.ops.aten.native_dropout_backward(x_MH, keep_MH, scale)  # type: ignore[no-any-return]
    return x_MH * keep_MH * scale


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, keep_MH: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(keep_MH)
        return _scaled(x_MH, keep_MH, scale)

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        (keep_MH,) = ctx.saved_tensors
        return _scaled(dy_MH, keep_MH, ctx.scale), None, None
