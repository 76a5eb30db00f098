"""Description of a rotary embedding as values; `attention/rotary.py` computes its tables.

linear   rate / factor (Chen et al. 2023, arXiv:2306.15595)
llama3   slow rates / factor, fast rates unchanged, interpolated between (Grattafiori et al. 2024, arXiv:2407.21783)
yarn     the same by pairs of channels, tables times an attention factor (Peng et al. 2023, arXiv:2309.00071)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LINEAR, LLAMA3, YARN = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary rates, with which a model reads longer sequences than it was trained on.

    Attributes:
        kind: `LINEAR`, `LLAMA3` or `YARN`; other attributes that it does not use are None.
        factor: what slow rates are divided by.
        original_max_position_embeddings: sequence length before scaling; llama3, yarn.
        low_freq_factor, high_freq_factor: rotations within this length below which a rate is divided, and above which
            it is kept; llama3.
        beta_slow, beta_fast: likewise; yarn.
        attention_factor: factor of queries and of keys; yarn.
        truncate: round the range of interpolated channels to whole channels; yarn.
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


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first `num_channels` channels of each head.

    Attributes:
        interleaved: neighbouring channels are a pair, not those at the same place of both halves.
    """

    base: float
    num_channels: int
    scaling: RotaryScaling | None = None
    interleaved: bool = False


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's factor of queries and keys, 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


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
