"""Slow ranks: which they are, and what the run would gain without them, or with fewer layers on them.

A rank is slow if its own time, its step time without waiting for other ranks, exceeds the median of its peers by a
factor, several times in a row.  The peers of a rank are the ranks of the same pipeline rank.  If each pipeline rank is
a single rank, all ranks are compared by their time per FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from megatron3d.errors import RunFailed
from megatron3d.forecast.search.nearby import describe_layout, nearby_layout
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.train.run import Run


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

    def excess(self, rank: int, times: Sequence[float]) -> float:
        """Return by how much the time of a rank exceeds what its peers take for as many FLOPs, given all times."""
        (group,) = (group for group in self.groups if rank in group)
        return times[rank] - self.flops[rank] * median_low(times[peer] / self.flops[peer] for peer in group)


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
        self.peers, self._factor = peers, factor
        self._num_steps = num_steps
        self._counts = [0] * len(peers.flops)

    def check(self, own_ms: Sequence[float]) -> list[Straggler]:
        """Return the ranks to report now, given the own time of every rank in a step."""
        scaled = [ms / flops for ms, flops in zip(own_ms, self.peers.flops, strict=True)]
        found = []
        for group in self.peers.groups:
            median = median_low(scaled[rank] for rank in group)
            for rank in group:
                is_slow = scaled[rank] > self._factor * median
                self._counts[rank] = self._counts[rank] + 1 if is_slow else 0
                if self._counts[rank] == self._num_steps:
                    found.append(Straggler(rank, scaled[rank] / median if median > 0 else float("inf")))
        return found


def straggler_detector(run: Run, flops: Sequence[int]) -> StragglerDetector | None:
    """Return the detector of slow ranks, given the FLOPs of one rank of each pipeline rank; None if it is off."""
    logging = run.config.logging
    if logging.straggler_factor is None or logging.timing_log_level == 0:
        return None
    return StragglerDetector(
        PeerGroups.of(run.spec.parallel_state, flops), logging.straggler_factor, logging.straggler_steps
    )


@dataclass(frozen=True)
class SlowRanks:
    """Ranks that were found slow after a step.

    Attributes:
        gains: the run is faster without them; known on rank 0.
    """

    ranks: tuple[int, ...]
    gains: bool = False


class Gain(NamedTuple):
    """Predicted time of a step without slow ranks over the present one's; infinite where others cannot go on alone."""

    ratio: float
    text: str


def gain_without(run: Run, slow: Sequence[Straggler], step_ms: float, excess_ms: float) -> Gain:
    """Return what the run would gain without slow ranks: spares take their places, or others do their work.

    All ranks wait for the slowest, which takes `excess_ms` of a step of `step_ms` longer than its peers.
    """
    spares = run.runtime.members.num_spares if run.runtime.members else 0
    size = run.runtime.world_size
    slowdown, layout, num_left = 1.0, describe_layout(run.spec), size - len(slow) + spares
    if num_left < size:
        try:
            chosen = nearby_layout(run.spec, num_left, run.config.logging.cluster)
        except RunFailed:
            return Gain(math.inf, "the others cannot go on alone")
        slowdown, layout, size = chosen.slowdown, chosen.text, chosen.num_ranks
    ratio = slowdown * (1 - min(1.0, max(0.0, excess_ms) / step_ms))
    text = f"without it a step would take {ratio:.2f} times as long, on {size} ranks ({layout})"
    return Gain(ratio, text + _with_fewer_layers(run, slow))


def _with_fewer_layers(run: Run, slow: Sequence[Straggler]) -> str:
    """Return in words what fewer layers on the pipeline rank of the slowest would gain, if they gain anything."""
    worst, pipeline = max(slow, key=lambda each: each.ratio), run.spec.pipeline
    place = run.spec.parallel_state.on_rank(worst.rank).pipeline_parallel_rank
    counts = [sum(len(stage.layers) for stage in pipeline.on_rank(each)) for each in range(pipeline.num_ranks)]
    found = fewer_layers(counts, place, worst.ratio)
    if found is None:
        return ""
    count, ratio = found
    return f"; with {count} of {counts[place]} layers on its pipeline rank, {ratio:.2f} times"


def fewer_layers(counts: Sequence[int], place: int, ratio: float) -> tuple[int, float] | None:
    """Return how many layers a slow pipeline rank should have, and the time of a step then over the present one.

    The time is that of the pipeline rank which takes longest, in layers (Malleus, Li et al. 2024); None: no number of
    layers is better.

    Args:
        counts: layers of each pipeline rank now.
        place: the slow one, which takes `ratio` times as long for a layer.
    """
    others, total = len(counts) - 1, sum(counts)
    present = max(count * (ratio if each == place else 1) for each, count in enumerate(counts))
    times = {own: max(own * ratio, -(-(total - own) // others)) for own in range(counts[place])} if others else {}
    best = min(times, key=lambda own: times[own], default=None)
    return None if best is None or times[best] >= present else (best, times[best] / present)
