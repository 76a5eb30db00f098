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

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron3d.errors import UserError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_ROUNDS = 8
_STEPS = tuple(np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64) for number in range(_ROUNDS))
_SCRAMBLE = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


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


def permutation_keys(what: str, epochs: Indices) -> _Words:
    """For `permute`: keys of what is permuted, another one in each epoch."""
    key = np.frombuffer(hashlib.sha256(what.encode()).digest(), "<u8", count=1).astype(np.uint64)
    return _mix(key ^ _mix(epochs.astype(np.uint64), 0), 0)


def permute(positions: Indices, size: int, keys: _Words) -> Indices:
    """Images of 1-D `positions` under the permutations of range(size) that the keys (one per position) choose."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    images = _feistel(positions.astype(np.uint64), rows, columns, keys)
    outside = images >= size
    while outside.any():
        images[outside] = _feistel(images[outside], rows, columns, keys[outside])
        outside = images >= size
    return images.astype(np.int64)


def _feistel(positions: _Words, rows: int, columns: int, keys: _Words) -> _Words:
    num_rows, num_columns = np.uint64(rows), np.uint64(columns)  # once, not in each operation
    left, right = np.divmod(positions, num_columns)
    for number in range(0, _ROUNDS, 2):
        left += _mix(right + keys, number) % num_rows
        left %= num_rows
        right += _mix(left + keys, number + 1) % num_columns
        right %= num_columns
    images: _Words = left * num_columns + right
    return images


def _mix(words: _Words, number: int) -> _Words:
    """Output `number` of the SplitMix64 generators that start at `words`."""
    words = words + _STEPS[number]
    for shift, factor in _SCRAMBLE:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words
