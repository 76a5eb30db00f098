"""The tokens of sample i: pure functions of (seed, i), without an index, in constant memory.

split    contiguous token ranges of the corpus by weight (not by documents: one long document is split too)
window w of a split = tokens [w S, w S + S]: S + 1 tokens, neighbours have one in common, a shorter rest is unused
sample i = window permutation[epoch](i mod windows), epoch = i div windows
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron3d.data.permutation import Indices, permutation_keys, permute
from megatron3d.errors import UserError


@dataclass(frozen=True)
class Split:
    """A contiguous range of the corpus."""

    first_token: int
    num_tokens: int

    def num_windows(self, seq_length: int) -> int:
        """Return the number of distinct samples."""
        return max(0, (self.num_tokens - 1) // seq_length)


def parse_weight(text: str) -> Fraction:
    """Return a number such as 7, 0.7, 1e-3 or 1/3; raises ValueError for others, and for exponents above 99."""
    if len(text) > 40 or re.search("[eE][-+]?[0-9_]{3}", text):
        raise ValueError("too long")
    return Fraction(text.strip())


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Parse the weights of train, valid and test, and normalize them to a sum of 1; raises UserError."""
    try:
        train, valid, test = map(parse_weight, split.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"data.split={split}: not three numbers for train, valid and test; use e.g. 969,30,1"
        ) from error
    total = train + valid + test
    if min(train, valid, test) < 0 or total == 0:
        raise UserError(f"data.split={split}: weights must be 0 or more, and one above 0; use e.g. 969,30,1")
    return train / total, valid / total, test / total


def split_tokens(num_tokens: int, split: str) -> tuple[Split, Split, Split]:
    """Return train, valid and test as consecutive token ranges that cover the corpus."""
    train, valid, _ = parse_split(split)
    first, second = int(num_tokens * train), int(num_tokens * (train + valid))
    return Split(0, first), Split(first, second - first), Split(second, num_tokens - second)


def sample_offsets(split: Split, seq_length: int, seed: int | None, samples: Indices) -> Indices:
    """Return the first token in the corpus of each sample; a seed of None reads in order."""
    num_windows = split.num_windows(seq_length)
    epochs, windows = np.divmod(samples, num_windows)
    if seed is not None:
        windows = permute(windows, num_windows, permutation_keys(f"data order {seed}", epochs))
    offsets: Indices = split.first_token + windows * seq_length
    return offsets
