"""Division of layers of unequal work among stages, such as layers with and without a window.

    work     9 1 1 1 | 9 1 | 1 1 9 | 1 9      each stage consecutive layers, the head's work added to the last

The least possible work of the busiest stage is found exactly: a limit is possible if stages filled up to it from the
last one hold all layers, so that it is searched by bisection.  Where ranks hold several stages, boundaries then move as
long as the busiest rank gets less work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter

Bounds = tuple[int, ...]
"""First layer of each stage, and the number of layers."""


@lru_cache(maxsize=256)
def balanced_counts(work: tuple[int, ...], head: int, owners: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one; `owners[stage]` is the rank of a stage."""
    sums = tuple(accumulate(work, initial=0))
    least = _filled(work, head, len(owners), _least_limit(work, head, len(owners)))
    assert least is not None, "the least limit is possible"
    starts = least, _shares(sums, head, len(owners))
    best = min((_improved(start, sums, head, owners) for start in starts), key=itemgetter(1))
    return tuple(high - low for low, high in pairwise(best[0]))


def _least_limit(work: Sequence[int], head: int, num_stages: int) -> int:
    """Return the least work of the busiest stage of any division."""
    low, high = max(*work, head + work[-1]) - 1, sum(work) + head
    while high - low > 1:
        middle = (low + high) // 2
        if _filled(work, head, num_stages, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _filled(work: Sequence[int], head: int, num_stages: int, limit: int) -> Bounds | None:
    """Return stages that are filled up to a limit from the last one; None where they do not hold all layers."""
    bounds, held = [len(work)], head
    for stage in reversed(range(num_stages)):
        low = bounds[-1]
        while low > stage and held + work[low - 1] <= limit:
            low -= 1
            held += work[low]
        if low == bounds[-1]:
            return None
        bounds.append(low)
        held = 0
    return tuple(reversed(bounds)) if bounds[-1] == 0 else None


def _shares(sums: Sequence[int], head: int, num_stages: int) -> Bounds:
    """Return the boundaries that are nearest to equal shares of the work."""
    bounds, num_layers = [0], len(sums) - 1
    for stage in range(1, num_stages):
        wanted = (sums[-1] + head) * stage / num_stages
        possible = range(bounds[-1] + 1, num_layers - (num_stages - stage) + 1)
        bounds.append(min(possible, key=lambda place: abs(sums[place] - wanted)))
    return (*bounds, num_layers)


def _cost(bounds: Bounds, sums: Sequence[int], head: int, owners: Sequence[int]) -> tuple[int, int]:
    """Return the work of the busiest rank, and the sum of squares of the stages' work."""
    stages = [sums[high] - sums[low] for low, high in pairwise(bounds)]
    stages[-1] += head
    ranks = [0] * (max(owners) + 1)
    for stage, owner in zip(stages, owners, strict=True):
        ranks[owner] += stage
    return max(ranks), sum(stage**2 for stage in stages)


def _improved(bounds: Bounds, sums: Sequence[int], head: int, owners: Sequence[int]) -> tuple[Bounds, tuple[int, int]]:
    """Return the division after all moves that lower its cost, and this cost."""
    found = bounds, _cost(bounds, sums, head, owners)
    while True:
        moved = ((other, _cost(other, sums, head, owners)) for other in _moves(found[0]))
        better = min(moved, key=itemgetter(1), default=found)
        if better[1] >= found[1]:
            return found
        found = better


def _moves(bounds: Bounds) -> Iterator[Bounds]:
    """Yield divisions in which neighbouring boundaries lie one layer further: a layer less here, one more there."""
    for first in range(1, len(bounds) - 1):
        for end in range(first + 1, len(bounds)):
            for step in (-1, 1):
                moved = (*bounds[:first], *(bound + step for bound in bounds[first:end]), *bounds[end:])
                if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                    yield moved
