"""Which tokens a sample is: pure functions of (seed, corpus, index), in constant memory, without an index.

split    contiguous token ranges of the corpus by weight (not by documents: one long document is split too)
window w of a split = tokens [w S, w S + S]: S + 1 tokens, neighbours have one in common, a shorter rest is unused
sample i = window permutation[epoch](i mod windows), epoch = i div windows

A permutation of range(n) is computed entry by entry: a Feistel network permutes a grid of rows x columns >= n cells,
rows and columns near the square root of n, by additions modulo rows and columns in place of exclusive or; an image
beyond n is permuted again until it is below n, which keeps the map a bijection (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains", sections 4 and 5).  The round function is SplitMix64 (Steele, Lea and Flood 2014).

The order of a blend's sources has integer weights p with the total T and repeats after T samples, p[s] of which come
from source s; for k sources it is the chairman assignment (Tijdeman 1980, "The chairman assignment problem", Discrete
Mathematics 32):

    | samples of s among the first n  -  n p[s] / T |  <=  1 - 1 / (2 k - 2)      for every n and s

The x-th sample of s is released at ceil((T + (2k-2) T x) / ((2k-2) p)), due at floor(T (2k-3 + (2k-2) x) / ((2k-2) p)),
and of the released ones the one that is due first is next (n from 1, x from 0).
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron3d.data.option_table import HF_PREFIX
from megatron3d.errors import UserError

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


MAX_TOTAL = 100_000
"""Largest total; finer weights are rounded to it, so that making the order takes little time."""


@dataclass(frozen=True)
class Blend:
    """An order of sources with integer weights `parts`."""

    parts: tuple[int, ...]

    def locate(self, samples: Indices) -> tuple[npt.NDArray[np.intp], Indices]:
        """Return the source of each sample, and its number among that source's samples."""
        order, ranks = self._order
        rounds, places = np.divmod(samples, sum(self.parts))
        sources = order[places]
        return sources, rounds * np.asarray(self.parts)[sources] + ranks[places]

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first samples are from each source."""
        rounds, rest = divmod(num_samples, sum(self.parts))
        partial = np.bincount(self._order[0][:rest], minlength=len(self.parts))
        return tuple(rounds * part + int(extra) for part, extra in zip(self.parts, partial, strict=True))

    def consumed_tokens(self, names: Sequence[str], spans: Iterable[tuple[int, int, int]]) -> Mapping[str, float]:
        """Return the metric of each source's tokens in spans (first sample, end, trained length); {} for one source."""
        totals = dict.fromkeys([f"consumed_tokens/{name}" for name in names], 0.0)
        for start, stop, length in spans if len(names) > 1 else ():
            for name, before, after in zip(totals, self.counts(start), self.counts(stop), strict=True):
                totals[name] += (after - before) * length
        return totals if len(names) > 1 else {}

    @cached_property
    def _order(self) -> tuple[npt.NDArray[np.intp], Indices]:
        order = np.fromiter(_assign(self.parts), np.intp, sum(self.parts))
        ranks = np.empty(len(order), np.int64)
        for source in range(len(self.parts)):
            places = np.flatnonzero(order == source)
            ranks[places] = np.arange(len(places))
        return order, ranks


ALONE = Blend((1,))


def _assign(parts: Sequence[int]) -> list[int]:
    total, unit = sum(parts), max(2 * len(parts) - 2, 1)
    waiting: list[tuple[int, int, int]] = []  # release, deadline, source
    urgent: list[tuple[int, int]] = []
    given, order = [0] * len(parts), []

    def enter(source: int) -> None:
        scale, x = unit * parts[source], given[source]
        release = -(-total * (1 + unit * x) // scale)
        deadline = total * (unit - 1 + unit * x) // scale
        heapq.heappush(waiting, (release, deadline, source))

    if len(parts) == 1:
        return [0] * total
    for source in range(len(parts)):
        enter(source)
    for number in range(1, total + 1):
        while waiting and waiting[0][0] <= number:
            _, deadline, source = heapq.heappop(waiting)
            heapq.heappush(urgent, (deadline, source))
        _, source = heapq.heappop(urgent)
        order.append(source)
        given[source] += 1
        enter(source)
    return order


def whole_parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return weights as integers without a common divisor, exact if their total is within MAX_TOTAL, else rounded.

    Raises UserError where rounding leaves a source nothing.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    exact = [int(weight * scale) for weight in weights]
    exact = [part // math.gcd(*exact) for part in exact]
    if sum(exact) <= MAX_TOTAL:
        return tuple(exact)
    shares = [Fraction(part * MAX_TOTAL, sum(exact)) for part in exact]
    parts = [int(share) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda source: parts[source] - shares[source])
    for source in by_rest[: MAX_TOTAL - sum(parts)]:
        parts[source] += 1
    if 0 in parts:
        source = parts.index(0)
        raise UserError(
            f"data.data_path: weight {source + 1} is {float(shares[source] / MAX_TOTAL):.2g} of all, less than one in "
            f"{MAX_TOTAL}; give it more, or leave the source out"
        )
    return tuple(part // math.gcd(*parts) for part in parts)


Paths = str | tuple[str | float | int, ...]


def parse_paths(key: str, value: Paths) -> tuple[tuple[str, Fraction | None], ...]:
    """Parse `PREFIX`, `[PREFIX, PREFIX, ...]` or `[WEIGHT, PREFIX, WEIGHT, PREFIX, ...]` to prefixes with weights.

    A weight of None stands for the size of the corpus.  Raises UserError.
    """
    words = (value,) if isinstance(value, str) else value
    weights = [_number(word) for word in words]
    shown = value if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
    if not any(weight is not None for weight in weights[::2]) or len(words) == 1:
        found: tuple[tuple[str, Fraction | None], ...] = tuple((str(word), None) for word in words)
        is_list = all(isinstance(word, str) for word in words)
    else:
        found = tuple((str(word), weight) for word, weight in zip(words[1::2], weights[::2], strict=False))
        is_list = len(words) % 2 == 0 and None not in weights[::2] and all(isinstance(w, str) for w in words[1::2])
    if not is_list or not words:
        raise UserError(
            f"{key}={shown}: neither a prefix, nor prefixes, nor weights and prefixes by turns; use for example "
            "[0.7, data/web, 0.3, data/books]"
        )
    given = [weight for _, weight in found if weight is not None]
    if given and (min(given) < 0 or sum(given) == 0):
        raise UserError(
            f"{key}={shown}: weights must be 0 or more, and one above 0; use for example [7, data/a, 3, data/b]"
        )
    repeated = [prefix for prefix, _ in found if [p for p, _ in found].count(prefix) > 1]
    if repeated:
        raise UserError(f"{key}={shown}: {repeated[0]} is there twice; give it one weight")
    return tuple((prefix, weight) for prefix, weight in found if weight != 0)


def is_streamed(value: Paths) -> bool:
    """Return whether a key's value names streamed datasets, one or several with weights."""
    words = (value,) if isinstance(value, str) else value
    return any(isinstance(word, str) and word.startswith(HF_PREFIX) for word in words)


def _number(word: str | float | int) -> Fraction | None:
    try:
        return parse_weight(str(word))
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class CorpusSpec:
    """Corpora that a run reads, and the options for reading them.

    Attributes:
        data_path: corpora that `split` divides into train, valid and test; None where each split has its own.
        split: weights of train, valid and test.
        seq_length: tokens of a sample, without the last label.
        seed: seed of the order of the training samples.
        vocab_size: tokens of the model; None: those of the tokenizer.
        validates: whether the run reads the valid split.
        add_bos_token: begin streamed documents with the tokenizer's bos token; None: as the tokenizer declares.
        skips_bad_records: leave out rows of a streamed dataset that cannot be read, instead of stopping.
    """

    data_path: Paths | None
    train_data_path: Paths | None
    valid_data_path: Paths | None
    test_data_path: Paths | None
    split: str
    seq_length: int
    seed: int
    vocab_size: int | None
    validates: bool
    tokenizer_type: str
    tokenizer_model: str | None
    add_bos_token: bool | None
    stream_key: str
    stream_lanes: int
    stream_shuffle_rows: int
    skips_bad_records: bool


def vocabulary_problem(named: str, model_size: int, tokenizer_size: int) -> str | None:
    """Return what is wrong with `model.vocab_size`, as `named`, for a tokenizer; None if the model has its tokens."""
    if model_size >= tokenizer_size:
        return None
    return f"{named}: less than the tokenizer's {tokenizer_size} tokens; use {tokenizer_size} or more, or leave it out"


def check_token_ids(prefix: Path, low: int, high: int, vocab_size: int, found: str | None = None) -> None:
    """Raise UserError, with `found` in words, unless token ids from `low` to `high` are in the vocabulary."""
    if low < 0 or high >= vocab_size:
        found = found or f"its token ids are {low} to {high}"
        raise UserError(
            f"data.data_path={prefix}: {found}, outside the vocabulary of {vocab_size}; "
            "set data.tokenizer_type and data.tokenizer_model to the tokenizer that made the corpus"
        )
