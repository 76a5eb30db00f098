"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Llama's order: channels i and i + D/2 are a pair.

    rate_i = base^(-2 i / D)      angle = position rate_i      scaled rates: attention/rotary_spec.py

Letters: B sequences, S positions, N heads, D rotated features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron3d.attention.rotary_spec import (
    LINEAR,
    LLAMA3,
    LONGROPE,
    YARN,
    Rotary,
    RotaryScaling,
    Temperature,
    yarn_range,
)

RotaryTables = tuple[Tensor, Tensor]
# Tables by position: those of a rotary embedding, or the factors of queries.
PositionTables = tuple[Tensor, ...]


def rotary_tables(seq_length: int, rotary: Rotary, like: Tensor) -> RotaryTables:
    """Return cos and sin [S, 1, D] of the rotary angles, times the attention factor of their scaling if it has one.

    They are in fp32 or wider: in bf16, angles that differ by less than a degree would be the same.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(seq_length, device=like.device, dtype=wide)
    angles = torch.outer(positions, rotary_rates(rotary, wide, like.device)).repeat(1, 2).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    factor = rotary.scaling.attention_factor if rotary.scaling else None
    return (cos, sin) if factor is None else (cos * factor, sin * factor)


def temperature_table(seq_length: int, temperature: Temperature, like: Tensor) -> PositionTables:
    """Return the factors [S, 1, 1] of the queries at each position, in fp32 or wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(seq_length, device=like.device) + temperature.offset
    return ((1 + temperature.beta * (positions // temperature.length).to(wide).log1p())[:, None, None],)


def rotary_rates(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the radians per position of each pair of channels, [D / 2]."""
    size = rotary.num_channels
    rates = rotary.base ** (-torch.arange(0, size, 2, device=device, dtype=dtype) / size)
    return rates if rotary.scaling is None else _SCALE[rotary.scaling.kind](rates, rotary, rotary.scaling)


def _linear(rates: Tensor, rotary: Rotary, scaling: RotaryScaling) -> Tensor:
    return rates / scaling.factor


# Width of a range of interpolated rates whose bounds are equal, as in Llama 4.
_NARROWEST = 1e-30


def _llama3(rates: Tensor, rotary: Rotary, scaling: RotaryScaling) -> Tensor:
    """Interpolate by the number of rotations within the original length."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    assert length is not None and low is not None and high is not None, "llama3 has a length and two bounds"
    kept = ((rates * (length / (2 * math.pi)) - low) / max(high - low, _NARROWEST)).clamp(0, 1)
    return rates * kept + rates / scaling.factor * (1 - kept)


def _yarn(rates: Tensor, rotary: Rotary, scaling: RotaryScaling) -> Tensor:
    """Interpolate by the place of the pair of channels."""
    low, high = yarn_range(rotary, scaling)
    pairs = torch.arange(len(rates), device=rates.device, dtype=rates.dtype)
    divided = ((pairs - low) / (high - low)).clamp(0, 1)
    return rates * (1 - divided) + rates / scaling.factor * divided


def _longrope(rates: Tensor, rotary: Rotary, scaling: RotaryScaling) -> Tensor:
    return rates / torch.tensor(rotary.pair_factors, dtype=rates.dtype, device=rates.device)


_SCALE: Mapping[str, Callable[[Tensor, Rotary, RotaryScaling], Tensor]] = {
    LINEAR: _linear,
    LLAMA3: _llama3,
    YARN: _yarn,
    LONGROPE: _longrope,
}


def rotate(x_BSND: Tensor, tables: RotaryTables, interleaved: bool = False) -> Tensor:
    """Return x [B, S, N, F] with its first D features rotated by the angles of its positions.

    Where it is narrower than the tables it is rounded once.  `interleaved`: features 2 i and 2 i + 1 are a pair; they
    are returned at i and i + D/2, which changes no product of queries and keys that are rotated alike.
    """
    cos, sin = tables
    if (size := cos.shape[-1]) < x_BSND.shape[-1]:
        return torch.cat((rotate(x_BSND[..., :size], tables, interleaved), x_BSND[..., size:]), dim=-1)
    if interleaved:
        x_BSND = x_BSND.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    left, right = x_BSND.chunk(2, dim=-1)
    return (x_BSND * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BSND.dtype)
