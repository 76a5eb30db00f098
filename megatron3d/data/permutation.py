"""Keyed permutations of range(n) that are computed entry by entry, in constant memory.

A Feistel network permutes a grid of rows x columns >= n cells, rows and columns near the square root of n, by additions
modulo rows and columns in place of exclusive or; an image beyond n is permuted again until it is below n, which keeps
the map a bijection (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5).  The round
function is SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_ROUNDS = 8
_STEPS = tuple(np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64) for number in range(_ROUNDS))
_SCRAMBLE = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def permutation_keys(what: str, epochs: Indices) -> _Words:
    """Return the keys for `permute`: a function of a name, different in each epoch."""
    key = np.frombuffer(hashlib.sha256(what.encode()).digest(), "<u8", count=1).astype(np.uint64)
    return _mix(key ^ _mix(epochs.astype(np.uint64), 0), 0)


def permute(positions: Indices, size: int, keys: _Words) -> Indices:
    """Return the images of 1-D `positions` under permutations of range(size), each position under its key's."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    images = _feistel(positions.astype(np.uint64), rows, columns, keys)
    outside = images >= size
    while outside.any():
        images[outside] = _feistel(images[outside], rows, columns, keys[outside])
        outside = images >= size
    return images.astype(np.int64)


def _feistel(positions: _Words, rows: int, columns: int, keys: _Words) -> _Words:
    num_rows, num_columns = np.uint64(rows), np.uint64(columns)  # converted once, not in each operation
    left, right = np.divmod(positions, num_columns)
    for number in range(0, _ROUNDS, 2):
        left += _mix(right + keys, number) % num_rows
        left %= num_rows
        right += _mix(left + keys, number + 1) % num_columns
        right %= num_columns
    images: _Words = left * num_columns + right
    return images


def _mix(words: _Words, number: int) -> _Words:
    """Return output `number` of the SplitMix64 generators that start at `words`."""
    words = words + _STEPS[number]
    for shift, factor in _SCRAMBLE:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words
