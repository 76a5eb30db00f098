"""The grid of ranks: named axes with sizes, and the arithmetic of coordinates and groups on them.

ranks = arange(world_size).reshape(pipeline, replica, data, *context axes, *tensor axes)   # the last varies fastest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

Axes = tuple[str, ...]

# Axes of data parallelism: ZeRO shards over `data`; `replica` is HSDP's replicate axis, of copies of these shards.
DATA: Axes = ("replica", "data")

# Axes that split positions inside sequences, of which a mesh has those of more than one rank: the second one where
# context parallelism is hierarchical.
CONTEXT: Axes = ("context", "context_inner")


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, seen from the global rank `rank`; the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]
    rank: int = 0

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.axes), f"mesh axes {self.axes} repeat a name"
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is outside a world of {self.world_size}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name, in mesh order."""
        return dict(self.axes)

    @cached_property
    def names(self) -> Axes:
        """Axis names in mesh order."""
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, step = {}, 1
        for name, size in reversed(self.axes):
            strides[name], step = step, step * size
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
        return tuple(name for name in self.names if name in wanted)

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
        return Mesh(self.axes, rank)


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
