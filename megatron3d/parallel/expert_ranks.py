"""Folding of experts onto the ranks of a pipeline stage: a second factorization of the same ranks.

    dense     pipeline | replica . data . context . tensor axes         split tokens and matrices
    experts   pipeline | edata . expert . etensor                       the last varies fastest

`etensor` splits each expert, `expert` distributes whole ones, and `edata` is what remains.  The two factorizations have
a common refinement: where the boundary of a factor falls inside a dense axis, that axis is split into pieces.

    8 ranks, data 4, t 2          data=0      1       2       3
                                  t=0  1   0  1    0  1    0  1
    EP 4: axes (data.1, t)          0  1   2  3    0  1    2  3         experts' coordinate
    EP 2, ETP 2: (data.1), (t)      0  0   1  1    0  0    1  1

So the ranks of an expert group are neighbours.  (Parallel folding, Liu et al. 2025, arXiv:2504.14960.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from megatron3d.parallel.mesh import DATA, Axes, Sizes
from megatron3d.parallel.modes.mode import Mode


class _Factor(NamedTuple):
    """An axis or a piece of one, of more than one rank; `end` is the product of it and of all factors inside it."""

    name: str
    size: int
    end: int


@dataclass(frozen=True)
class Folding:
    """Axes that distribute whole experts, axes that split each, both in mesh order, and the axes that have pieces."""

    experts: Axes = ()
    etensor: Axes = ()
    pieces: tuple[tuple[str, Sizes], ...] = ()


def fold(axes: Sizes, experts: int, etensor: int = 1) -> Folding | None:
    """Return the folding of `etensor` x `experts` ranks onto the last of `axes`; None where no refinement has them.

    Args:
        axes: dense axes of a stage, the last one varying fastest.
    """
    if experts == etensor == 1:
        return Folding()
    if not all(ranks for _, ranks in axes):  # sizes that do not make the world, which other rules refuse
        return None
    cuts, inner = (etensor, etensor * experts), 1
    factors: list[_Factor] = []
    pieces: list[tuple[str, Sizes]] = []
    for name, ranks in reversed(axes):
        end = inner * ranks
        edges = sorted({inner, end, *(cut for cut in cuts if inner < cut < end)})
        if any(high % low for low, high in pairwise(edges)):
            return None
        made = tuple(_split(name, edges))
        if len(made) > 1:
            pieces.insert(0, (name, tuple((each.name, each.size) for each in made)))
        factors, inner = [*made, *factors], end
    if cuts[-1] > inner:
        return None
    split = tuple(each.name for each in factors if each.end <= cuts[0])
    whole = tuple(each.name for each in factors if cuts[0] < each.end <= cuts[1])
    return Folding(whole, split, tuple(pieces))


def _split(name: str, edges: list[int]) -> Iterator[_Factor]:
    """Yield the factors of an axis between `edges`, the slowest first: the axis itself, or its pieces."""
    ranges = list(pairwise(edges))
    for place, (low, high) in enumerate(reversed(ranges)):
        yield _Factor(name if len(ranges) == 1 else f"{name}.{place}", high // low, high)


def stage_axes(mode: Mode, num_shards: int, num_replicas: int = 1) -> Sizes:
    """Return the dense axes of the ranks of a pipeline stage, where `num_shards` are data ranks of one replica."""
    return (*zip(DATA, (num_replicas, num_shards), strict=True), *mode.axes)


def expert_sizes(axes: Sizes, etensor: int = 1) -> dict[int, Axes]:
    """Return the possible expert-parallel sizes on a stage, each with its axes."""
    ranks = 1
    for _, size in axes:
        ranks *= size
    found = {size: fold(axes, size, etensor) for size in range(1, ranks // etensor + 1) if ranks % size == 0}
    return {size: folding.experts for size, folding in found.items() if folding is not None}


def with_experts(mode: Mode, size: int, etensor: int, axes: Sizes) -> Mode:
    """Return a mode whose experts are distributed over `size` ranks, each split over `etensor`; unchanged where the
    axes of a stage have no such folding."""
    folding = fold(axes, size, etensor) or Folding()
    return replace(mode, experts=folding.experts, etensor=folding.etensor, pieces=folding.pieces)
