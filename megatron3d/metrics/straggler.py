"""Detector of slow ranks: those whose own time exceeds the median of their peers by a factor, several times in a row.

A rank's own time is its step time without waiting for other ranks.  The peers of a rank are the ranks of the same
pipeline rank.  If each pipeline rank is a single rank, all ranks are compared by their time per FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from megatron3d.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class PeerGroups:
    """Ranks that are compared with each other, and the FLOPs of each rank by which its time is divided."""

    groups: tuple[tuple[int, ...], ...]
    flops: tuple[float, ...]

    @staticmethod
    def of(state: ParallelState, flops: Sequence[float]) -> PeerGroups:
        """Return the groups of a run, given the FLOPs of a step on one rank of each pipeline rank."""
        size = state.tensor_parallel_size * state.data_parallel_size
        coords = [state.on_rank(rank).pipeline_parallel_rank for rank in range(state.world_size)]
        if size == 1:
            groups = [tuple(rank for rank, coord in enumerate(coords) if flops[coord] > 0)]
        else:
            groups = [tuple(rank for rank, at in enumerate(coords) if at == coord) for coord in range(len(flops))]
        return PeerGroups(tuple(groups), tuple(max(1.0, flops[coord]) for coord in coords))


class Straggler(NamedTuple):
    """A slow rank, and its own time divided by the median of its peers."""

    rank: int
    ratio: float


class StragglerDetector:
    """Counts how many logged steps in a row each rank was slow.

    Args:
        factor: ratio to the median above which a rank is slow.
        num_steps: logged steps in a row after which a slow rank is reported, once until it recovers.
    """

    def __init__(self, peers: PeerGroups, factor: float, num_steps: int) -> None:
        self._peers, self._factor = peers, factor
        self._num_steps = num_steps
        self._counts = [0] * len(peers.flops)

    def check(self, own_ms: Sequence[float]) -> list[Straggler]:
        """Return the ranks to report now, given the own time of every rank in a step."""
        scaled = [ms / flops for ms, flops in zip(own_ms, self._peers.flops, strict=True)]
        found = []
        for group in self._peers.groups:
            median = median_low(scaled[rank] for rank in group)
            for rank in group:
                is_slow = scaled[rank] > self._factor * median
                self._counts[rank] = self._counts[rank] + 1 if is_slow else 0
                if self._counts[rank] == self._num_steps:
                    found.append(Straggler(rank, scaled[rank] / median if median > 0 else float("inf")))
        return found
