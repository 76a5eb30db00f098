"""Homes of whole logical matrices: which rank computes which, for optimizers that need them.

Homes are the ranks of a pipeline stage, on tensor, context and data axes alike, replicas included: the shards of an
expert may lie on several of these.  Experts stay on the ranks that hold them, whole or in shards; any other matrix may
go to any rank, and one that is too large for one home is divided among all, in slabs of its longer side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron3d.parallel.layout import Box, ParamSpec, Part, Shape, span
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh

# Least number of matrices of a round, and of their elements, for each home: with fewer, some would be idle.
MATRICES_PER_HOME, ELEMENTS_PER_HOME = 2, 2**24
# Parameters of a flat buffer by path.
Params = Mapping[str, ParamSpec]
# Returns the work on a matrix of a shape, up to a factor.
Work = Callable[[Shape], float]


class HomeMatrix(NamedTuple):
    """A logical matrix or a slab of it, its parameter, and its home: the index of a rank on the home axes.

    Attributes:
        box: what its home computes: all of the matrix, or a slab.
    """

    path: str
    part: Part
    home: int
    box: Box

    @property
    def numel(self) -> int:
        """Elements of the box."""
        (top, bottom), (left, right) = self.box
        return (bottom - top) * (right - left)

    @property
    def is_slab(self) -> bool:
        """Whether other homes have the rest of the matrix."""
        return self.numel < matrix_numel(self.part)


class HomeRound(NamedTuple):
    """Flat buffers, by their index, whose matrices travel and are computed together."""

    flats: tuple[int, ...]
    matrices: tuple[HomeMatrix, ...]


def home_axes(mesh: Mesh) -> Axes:
    """Return the axes of the ranks among which whole matrices are divided: all of a pipeline stage."""
    return mesh.nontrivial(mesh.without(mesh.names, (PIPELINE,)))


def plan_homes(flats: Sequence[Params], mesh: Mesh, work: Work, most: float = math.inf) -> list[HomeRound]:
    """Return the rounds in which the matrices of flat buffers are computed, in the order of backward.

    Longest first, each matrix goes to the rank that has the least to do by then.  Those of more than `most` elements
    are divided among all ranks.
    """
    ranks = _HomeRanks(mesh, work, most)
    return [
        HomeRound(numbers, tuple(ranks.assign([flats[number] for number in numbers])))
        for numbers in _grouped(flats, ranks.size)
    ]


def _grouped(flats: Sequence[Params], num_homes: int) -> Iterator[tuple[int, ...]]:
    found: list[int] = []
    count = elements = 0
    for number in reversed(range(len(flats))):
        found.append(number)
        parts = [part for spec in flats[number].values() for part in spec.parts]
        count, elements = count + len(parts), elements + sum(map(matrix_numel, parts))
        if count >= MATRICES_PER_HOME * num_homes and elements >= ELEMENTS_PER_HOME * num_homes:
            yield tuple(found)
            found, count, elements = [], 0, 0
    if found:
        yield tuple(found)


def matrix_numel(part: Part) -> int:
    """Return the number of elements of a matrix."""
    rows, columns = part.shape
    return rows * columns


def slab(part: Part, index: int, count: int) -> Box:
    """Return one of `count` slabs of the longer side of a matrix, of columns where it is square; some may be empty."""
    rows, columns = part.shape
    size = max(rows, columns)
    step = -(-size // count)
    cut = min(index * step, size), min((index + 1) * step, size)
    return (cut, (0, columns)) if rows > columns else ((0, rows), cut)


class _HomeRanks:
    """The ranks that matrices are divided among, with what each has to do so far."""

    def __init__(self, mesh: Mesh, work: Work, most: float) -> None:
        self._mesh, self._work, self._most, axes = mesh, work, most, home_axes(mesh)
        self.size, self._ranks = mesh.size(axes), mesh.ranks(axes)
        self._load = [0.0] * self.size
        self._spans: dict[tuple[int, Axes], list[tuple[int, int]]] = {}

    def assign(self, flats: Iterable[Params]) -> list[HomeMatrix]:
        """Return the matrices with their homes, in the order of the parameters."""
        found = [
            (path, self._holders(spec, index), part)
            for params in flats
            for path, spec in params.items()
            for index, part in enumerate(spec.parts)
        ]
        homes = [range(0)] * len(found)
        for place in sorted(range(len(found)), key=lambda place: -self._work(found[place][2].shape)):
            _, holders, part = found[place]
            first = min(holders, key=self._load.__getitem__)
            homes[place] = range(self.size) if self.divides(part, len(holders)) else range(first, first + 1)
            for home in homes[place]:
                self._load[home] += self._work(part.shape) / len(homes[place])
        return [
            HomeMatrix(path, part, home, slab(part, home - ranks[0], len(ranks)))
            for (path, _, part), ranks in zip(found, homes, strict=True)
            for home in ranks
        ]

    def divides(self, part: Part, num_holders: int) -> bool:
        """Return whether a matrix is divided among all ranks."""
        return 1 < num_holders == self.size and matrix_numel(part) > self._most

    def _holders(self, spec: ParamSpec, index: int) -> Sequence[int]:
        """Return the ranks that hold a part, or a shard of it."""
        if not spec.part_axes:
            return range(self.size)
        key = len(spec.parts), spec.part_axes
        if key not in self._spans:
            self._spans[key] = [span(*key, self._mesh.at(rank)) for rank in self._ranks]
        return [rank for rank, (low, high) in enumerate(self._spans[key]) if low <= index < high]
