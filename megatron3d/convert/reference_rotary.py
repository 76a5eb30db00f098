"""Rotary positions of the reference forward passes, and values of config.json with defaults.

Letters: B sequences, S positions, N heads, D features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron3d.convert.fields import HubConfig


def rotated(x_BNSD: Tensor, hf: HubConfig, local_base: str) -> Tensor:
    """Rotate channels i and i + R/2 of the first R of each head, as real and imaginary parts."""
    described = table_of(hf, "rope_parameters")
    if local_base:
        local = table_of(described, "sliding_attention")
        theta = float_of(local, "rope_theta", float_of(hf, local_base, float_of(hf, "rope_theta", 10000.0)))
        hf, described = {"rope_theta": theta}, {}
    elif "full_attention" in described:
        described = table_of(described, "full_attention")
        hf = {**hf, "rope_parameters": dict(described)}
    share = float_of(described, "partial_rotary_factor", float_of(hf, "partial_rotary_factor", 1.0))
    size = int(x_BNSD.shape[-1] * share)
    rates, scale = _rotary_rates(hf, size)
    angles = torch.outer(torch.arange(x_BNSD.shape[2]), torch.tensor(rates, dtype=torch.float64))
    turn = torch.polar(torch.tensor(scale, dtype=torch.float64), angles)
    turned = torch.complex(*x_BNSD[..., :size].chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag, x_BNSD[..., size:]), dim=-1)


def _rotary_rates(hf: HubConfig, size: int) -> tuple[list[float], float]:
    """Return the radians per position of each pair of channels, and the factor of queries and keys."""
    described = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = described if isinstance(described, dict) else {}
    base = float_of(rope if "rope_theta" in rope else hf, "rope_theta", 10000.0)
    rates = [math.pow(base, -2 * pair / size) for pair in range(size // 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rates, 1.0
    factor = float_of(rope, "factor", 1.0)
    length = float_of(rope, "original_max_position_embeddings", float_of(hf, "max_position_embeddings", 2048))
    slow, fast = float_of(rope, "beta_slow", 1.0), float_of(rope, "beta_fast", 32.0)
    low, high = float_of(rope, "low_freq_factor", 1.0), float_of(rope, "high_freq_factor", 4.0)

    def pair_of(rotations: float) -> float:
        """Return which pair of channels turns so often within the original length."""
        return size / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    def share(pair: int) -> float:
        """Return the share of the unscaled rate."""
        if kind == "llama3":
            return (length * rates[pair] / (2 * math.pi) - low) / (high - low)
        first, last = pair_of(fast), pair_of(slow)
        if rope.get("truncate") is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        return 1 - (pair - first) / (last - first or 0.001)

    shares = [0.0 if kind == "linear" else min(max(share(pair), 0.0), 1.0) for pair in range(size // 2)]
    scaled = [rate * (each + (1 - each) / factor) for rate, each in zip(rates, shares, strict=True)]
    default = 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * float_of(rope, name, 1.0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        default = above / below
    return scaled, float_of(rope, "attention_factor", default)


def int_of(hf: HubConfig, name: str, default: int) -> int:
    value = hf.get(name)
    return value if isinstance(value, int) else default


def table_of(hf: HubConfig, name: str) -> HubConfig:
    value = hf.get(name)
    return value if isinstance(value, dict) else {}


def float_of(hf: HubConfig, name: str, default: float) -> float:
    value = hf.get(name)
    return float(value) if isinstance(value, int | float) else default
