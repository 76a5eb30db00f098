"""The source of each sample of a blend: a function of its index that keeps each source within one of its share.

Weights are integers p with the total T.  The order repeats after T samples, p[s] of which come from source s; for k
sources it is the chairman assignment (Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32):

    | samples of s among the first n  -  n p[s] / T |  <=  1 - 1 / (2 k - 2)      for every n and s

The x-th sample of s is released at ceil((T + (2k-2) T x) / ((2k-2) p)), due at floor(T (2k-3 + (2k-2) x) / ((2k-2) p)),
and of the released ones the one that is due first is next (n from 1, x from 0).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron3d.data.corpus.samples import parse_weight
from megatron3d.data.permutation import Indices
from megatron3d.errors import UserError

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

    @cached_property
    def _order(self) -> tuple[npt.NDArray[np.intp], Indices]:
        order = np.fromiter(_assign(self.parts), np.intp, sum(self.parts))
        ranks = np.empty(len(order), np.int64)
        for source in range(len(self.parts)):
            places = np.flatnonzero(order == source)
            ranks[places] = np.arange(len(places))
        return order, ranks


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


def _number(word: str | float | int) -> Fraction | None:
    try:
        return parse_weight(str(word))
    except (ValueError, ZeroDivisionError):
        return None
