"""The grid of ranks: arithmetic on axis names and sizes, without any communicator.

ranks = arange(world).reshape(pipeline, data, *tensor axes)      # last axis fastest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

Axes = tuple[str, ...]

# All data-parallel ranks.  What ZeRO shares out it shares over the second; the first holds copies of that.
DATA: Axes = ("replica", "data")


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, seen from one rank; the last axis varies fastest."""

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
        """My position along one axis."""
        return self.rank // self._strides[axis] % self.sizes[axis]

    def size(self, axes: Iterable[str]) -> int:
        """Number of ranks along several axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Iterable[str]) -> int:
        """My position along several axes fused into one, the first axis slowest."""
        position = 0
        for axis in axes:
            position = position * self.sizes[axis] + self.coord(axis)
        return position

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """Ranks that differ from mine along `axes` only, the first of `axes` slowest."""
        origin = self.rank - sum(self.coord(axis) * self._strides[axis] for axis in axes)
        steps = [range(0, self.sizes[axis] * self._strides[axis], self._strides[axis]) for axis in axes]
        return tuple(origin + sum(offsets) for offsets in product(*steps))

    def nontrivial(self, axes: Iterable[str]) -> Axes:
        """Those of `axes` that really split something, in the given order."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def in_order(self, axes: Iterable[str]) -> Axes:
        """`axes` without repeats, in mesh order."""
        wanted = set(axes)
        return tuple(name for name in self.names if name in wanted)

    def at(self, rank: int) -> Mesh:
        """The same mesh seen from another rank."""
        return Mesh(self.axes, rank)


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in few words, `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, dict.fromkeys(each))) for each in runs)
