"""The grid of ranks: named axes with sizes, the arithmetic of coordinates and groups, and point-to-point links.

ranks = arange(world_size).reshape(pipeline, replica, data, *context axes, *tensor axes)   # the last varies fastest

An axis may be split into pieces, which are axes as well: `data` of 8 ranks into `data.0` of 2 and `data.1` of 4.  Only
the experts of a layer use pieces (experts/plan.py), so that their axes need not be those of the dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

Axes = tuple[str, ...]
Sizes = tuple[tuple[str, int], ...]  # axes with their sizes, the last one varying fastest

PIPELINE = "pipeline"  # axis of pipeline parallelism: the rank's coordinate is its pipeline rank

# Axes of data parallelism: ZeRO shards over `data`; `replica` is HSDP's replicate axis, of copies of these shards.
DATA: Axes = ("replica", "data")

# Axes that split positions inside sequences, of which a mesh has those of more than one rank: the second one where
# context parallelism is hierarchical.
CONTEXT: Axes = ("context", "context_inner")


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, seen from the global rank `rank`; the last axis varies fastest.

    Attributes:
        pieces: axes that are split, each with the pieces that it is the product of; () for all others.
    """

    axes: Sizes
    rank: int = 0
    pieces: tuple[tuple[str, Sizes], ...] = ()

    def __post_init__(self) -> None:
        assert len(dict(self.axes)) == len(self.axes), f"mesh axes {self.axes} repeat a name"
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is outside a world of {self.world_size}"
        for axis, pieces in self.pieces:
            made = math.prod(size for _, size in pieces)
            assert made == dict(self.axes)[axis], f"pieces {pieces} do not make {axis} of {self.axes}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name, in mesh order, each followed by its pieces if there are any."""
        sizes: dict[str, int] = {}
        for name, size in self.axes:
            sizes |= {name: size, **dict(self._pieces_of(name))}
        return sizes

    def _pieces_of(self, axis: str) -> Sizes:
        return dict(self.pieces).get(axis, ())

    @cached_property
    def names(self) -> Axes:
        """Axis names in mesh order, without pieces."""
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, step = {}, 1
        for name, size in reversed(self.axes):
            strides[name], inner = step, step
            for piece, ranks in reversed(self._pieces_of(name)):
                strides[piece], inner = inner, inner * ranks
            step *= size
        return strides

    def coord(self, axis: str) -> int:
        """Return the coordinate of this rank along one axis."""
        return self.rank // self._strides[axis] % self.sizes[axis]

    def size(self, axes: Iterable[str]) -> int:
        """Return the number of ranks of a group over several axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Iterable[str]) -> int:
        """Return the rank of this process within its group over several axes, the first axis slowest."""
        position = 0
        for axis in axes:
            position = position * self.sizes[axis] + self.coord(axis)
        return position

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """Return the global ranks of this rank's group over `axes`, the first of `axes` slowest."""
        origin = self.rank - sum(self.coord(axis) * self._strides[axis] for axis in axes)
        steps = [range(0, self.sizes[axis] * self._strides[axis], self._strides[axis]) for axis in axes]
        return tuple(origin + sum(offsets) for offsets in product(*steps))

    def nontrivial(self, axes: Iterable[str]) -> Axes:
        """Return those of `axes` that have more than one rank, in the given order."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def in_order(self, axes: Iterable[str]) -> Axes:
        """Return `axes` in mesh order, each once."""
        wanted = set(axes)
        return tuple(name for name in self.sizes if name in wanted)

    def split(self, axes: Iterable[str]) -> Axes:
        """Return `axes` with the pieces of each axis that has pieces in place of it."""
        return tuple(name for axis in axes for name in dict(self._pieces_of(axis) or ((axis, 0),)))

    def joined(self, axes: Axes) -> Axes:
        """Return `axes` with an axis in place of all its pieces where these follow one another."""
        for axis, sizes in self.pieces:
            pieces = tuple(dict(sizes))
            starts = [at for at in range(len(axes)) if axes[at : at + len(pieces)] == pieces]
            for at in starts:
                axes = (*axes[:at], axis, *axes[at + len(pieces) :])
        return axes

    def without(self, axes: Iterable[str], taken: Iterable[str]) -> Axes:
        """Return what `taken` leaves of `axes`, in the given order; of an axis, the pieces that are not taken."""
        gone = set(self.split(taken))
        return self.joined(tuple(axis for axis in self.split(axes) if axis not in gone))

    @property
    def context(self) -> Axes:
        """Axes that split positions inside sequences."""
        return tuple(axis for axis in CONTEXT if axis in self.sizes)

    @property
    def zero(self) -> Axes:
        """Axes over which ZeRO shards: `data` and those of context parallelism."""
        return self.nontrivial((*(axis for axis in DATA[1:] if axis in self.sizes), *self.context))

    def at(self, rank: int) -> Mesh:
        """Return the mesh seen from another rank."""
        return Mesh(self.axes, rank, self.pieces)


def disjoint_cover(axes: Axes, sets: Iterable[Axes]) -> tuple[Axes, ...]:
    """Return the fewest of `sets` that together have every axis of `axes` exactly once; () where none have."""
    inside = [each for each in dict.fromkeys(sets) if each and set(each) <= set(axes)]
    for count in range(1, len(axes) + 1):
        for chosen in combinations(inside, count):
            if sorted(axis for each in chosen for axis in each) == sorted(axes):
                return chosen
    return ()


def ranges(ranks: Sequence[int]) -> str:
    """Format ranks as `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, dict.fromkeys(each))) for each in runs)


@dataclass(frozen=True, order=True)
class Link:
    """Two ranks that differ along one axis only: their coordinates on it, the smaller first."""

    axis: str
    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low < self.high, f"a link joins two ranks, not {self}"

    @property
    def ends(self) -> tuple[int, int]:
        """Coordinates of both ends."""
        return self.low, self.high

    def ranks(self, mesh: Mesh) -> tuple[int, int]:
        """Return the global ranks of both ends, given the mesh of either."""
        line = mesh.ranks((self.axis,))
        return line[self.low], line[self.high]


def matchings(links: Iterable[Link]) -> list[list[Link]]:
    """Return all links in rounds (greedy matchings): no rank is in two links of one round."""
    rounds: list[list[Link]] = []
    for link in sorted(set(links)):
        free = (r for r in rounds if not any({*link.ends} & {*other.ends} for other in r))
        if (found := next(free, None)) is None:
            rounds.append(found := [])
        found.append(link)
    return rounds
