"""Description of a rotary embedding as values; `attention/rotary.py` computes its tables.

linear   rate / factor (Chen et al. 2023, arXiv:2306.15595)
llama3   slow rates / factor, fast rates unchanged, interpolated between (Grattafiori et al. 2024, arXiv:2407.21783)
yarn     the same by pairs of channels, tables times an attention factor (Peng et al. 2023, arXiv:2309.00071)
longrope rate / a factor of each pair, of one list up to the original length and of another above it, tables times an
         attention factor (Ding et al. 2024, arXiv:2402.13753)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LINEAR, LLAMA3, YARN, LONGROPE = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary rates, with which a model reads longer sequences than it was trained on.

    Attributes:
        kind: `LINEAR`, `LLAMA3`, `YARN` or `LONGROPE`; other attributes that it does not use are None.
        factor: what slow rates are divided by; with longrope only the default of the attention factor follows from it.
        original_max_position_embeddings: sequence length before scaling; all but linear.
        low_freq_factor, high_freq_factor: rotations within this length below which a rate is divided, and above which
            it is kept; llama3.
        beta_slow, beta_fast: likewise; yarn.
        attention_factor: factor of queries and of keys; yarn, longrope.
        truncate: round the range of interpolated channels to whole channels; yarn.
        short_factor, long_factor: what the rate of each pair is divided by in models whose sequences have at most the
            original length, and in others; longrope.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_slow: float | None = None
    beta_fast: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def pair_factors(self, seq_length: int) -> tuple[float, ...]:
        """Return the list of longrope that a model of this sequence length uses; empty without longrope."""
        length = self.original_max_position_embeddings or seq_length
        return (self.short_factor if seq_length <= length else self.long_factor) or ()


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first `num_channels` channels of each head.

    Attributes:
        interleaved: neighbouring channels are a pair, not those at the same place of both halves.
        pair_factors: what longrope divides the rate of each pair by.
    """

    base: float
    num_channels: int
    scaling: RotaryScaling | None = None
    interleaved: bool = False
    pair_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Temperature:
    """Factor of the queries at each position p (Nakanishi 2025, arXiv:2501.19399, in Meta's and Mistral's form).

    1 + beta ln(1 + floor((p + offset) / length))
    """

    beta: float
    length: int
    offset: int = 0


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's factor of queries and keys, 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, length: int) -> float:
    """Return LongRoPE's factor of queries and keys, the root of 1 + ln(factor) / ln(original length)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(length)) if min(factor, length) > 1 else 1.0


def yarn_range(rotary: Rotary, scaling: RotaryScaling) -> tuple[float, float]:
    """Return the pairs of channels between which YaRN interpolates, by their rotations within the original length."""
    length, slow, fast = scaling.original_max_position_embeddings, scaling.beta_slow, scaling.beta_fast
    assert length is not None and slow is not None and fast is not None, "yarn has a length and two bounds"

    def pair(rotations: float) -> float:
        return rotary.num_channels * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = pair(fast), pair(slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.num_channels - 1)
    return low, high if high != low else high + 0.001
