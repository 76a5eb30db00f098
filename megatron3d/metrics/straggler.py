"""Who is slower than the others that do the same: a rank whose own time (without waiting for anybody) is more than a
factor above the median in several logged steps in a row.

Ranks are compared with those of the same part of the pipeline.  Where each part has one rank only, all are compared by
their time per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from megatron3d.parallel.mesh import Mesh


@dataclass(frozen=True)
class Peers:
    """With whom each rank is compared, and by how many operations of a step its time is divided."""

    groups: tuple[tuple[int, ...], ...]
    operations: tuple[float, ...]

    @staticmethod
    def of(mesh: Mesh, operations: Sequence[float]) -> Peers:
        """Of a mesh whose ranks of each part of the pipeline do so many operations in a step."""
        size = mesh.world_size // mesh.sizes["pipeline"]
        coords = [mesh.at(rank).coord("pipeline") for rank in range(mesh.world_size)]
        alone = [tuple(rank for rank, coord in enumerate(coords) if operations[coord] > 0)]
        together = [tuple(rank for rank, at in enumerate(coords) if at == coord) for coord in range(len(operations))]
        return Peers(tuple(alone if size == 1 else together), tuple(max(1.0, operations[coord]) for coord in coords))


class Slow(NamedTuple):
    """A rank, and how many times the median its own time is."""

    rank: int
    ratio: float


class Stragglers:
    """Counts in how many logged steps in a row each rank was slow.

    Args:
        factor: above the median, from which a rank is slow.
        num_steps: in a row, after which it is named, once until it is no longer slow.
    """

    def __init__(self, peers: Peers, factor: float, num_steps: int) -> None:
        self._peers, self._factor, self._num_steps = peers, factor, num_steps
        self._counts = [0] * len(peers.operations)

    def see(self, own_ms: Sequence[float]) -> list[Slow]:
        """Who is to be named now, from the own times of all ranks in a step."""
        each = [ms / count for ms, count in zip(own_ms, self._peers.operations, strict=True)]
        found = []
        for group in self._peers.groups:
            median = median_low(each[rank] for rank in group)
            for rank in group:
                is_slow = each[rank] > self._factor * median
                self._counts[rank] = self._counts[rank] + 1 if is_slow else 0
                if self._counts[rank] == self._num_steps:
                    found.append(Slow(rank, each[rank] / median if median > 0 else float("inf")))
        return found
