"""Which tokens sample i is: pure functions of (seed, i), no index, constant memory.

    split    contiguous token ranges of the corpus by weight (not documents: one long document splits too)
    window w of a split = tokens [w S, w S + S] : S + 1 tokens, neighbours share one; a last piece below S + 1 is unused
    sample i = window permutation[epoch](i mod windows), epoch = i div windows

The permutation is a Feistel network on rows x columns >= windows, rows and columns near the square root, additions
modulo rows and columns in place of exclusive or; results beyond `windows` are sent through again until they fall
inside, which keeps it a bijection (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4, 5).
The round function is SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

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
        """Number of different samples."""
        return max(0, (self.num_tokens - 1) // seq_length)


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """The weights of train, valid and test as parts of 1; raises UserError."""
    try:
        train, valid, test = (Fraction(weight.strip()) for weight in split.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"data.split={split}: not three numbers for train, valid and test; use e.g. 969,30,1"
        ) from error
    total = train + valid + test
    if min(train, valid, test) < 0 or total == 0:
        raise UserError(f"data.split={split}: weights must be 0 or more, and one above 0; use e.g. 969,30,1")
    return train / total, valid / total, test / total


def split_tokens(num_tokens: int, split: str) -> tuple[Split, Split, Split]:
    """Train, valid and test as neighbouring token ranges that cover the corpus, in this order."""
    train, valid, _ = parse_split(split)
    ends = (int(num_tokens * train), int(num_tokens * (train + valid)), num_tokens)
    starts = (0, *ends)
    first, second, third = (Split(start, end - start) for start, end in zip(starts, ends, strict=False))
    return first, second, third


def sample_offsets(split: Split, seq_length: int, seed: int | None, samples: Indices) -> Indices:
    """First token in the corpus of each sample, for samples 0, 1, ... without end; seed None reads in order."""
    num_windows = split.num_windows(seq_length)
    epochs, windows = np.divmod(samples, num_windows)
    if seed is not None:
        windows = permute(windows, num_windows, permutation_keys(f"data order {seed}", epochs))
    offsets: Indices = split.first_token + windows * seq_length
    return offsets
