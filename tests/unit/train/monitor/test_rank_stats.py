"""Fact: all-reduced statistics are those of all ranks' numbers, and name the first rank with the largest.

A sum over overlapping groups, or the rank of another label's maximum, would be seen here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.metrics.timers import BACKWARD, BATCH, FORWARD, PHASES, SCHEDULE, Spread, own_ms
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.train.monitor.monitor import MEMORY, TIMERS, RankStatistics
from tests.support.turn_ranks import make_comm, run_turns

SETS: list[Axes] = [("pipeline",), ("data",), ("t",)]
AXES = (("pipeline", 2), ("replica", 1), ("data", 2), ("t", 2))
WAIT = ExposedComm(("data",))


def times_ms(rank: int) -> dict[str, float]:
    """Return times of a rank; all ranks wait alike, rank 5 computes longest, and ranks 3 and 6 read longest."""
    reads = {3: 8.0, 6: 8.0}.get(rank, 1.5)
    return {BATCH: reads, SCHEDULE: 50.0 + rank, FORWARD: 20.0 + (rank == 5), WAIT: 5.0}


def statistics(rank: int, world_size: int) -> tuple[Any, list[float], Any, int | None]:
    comm: Any = make_comm(Mesh(AXES, rank), SETS)
    comm.axis_sets = tuple(SETS)
    stats = RankStatistics(comm, torch.device("cpu"), num_lanes=2)
    ranks = stats.reduce(times_ms(rank), (rank // 4, 3))
    return ranks, stats.own_ms(times_ms(rank)), stats.tables(ranks), stats.skipped_records(ranks)


def test_statistics_are_those_of_all_ranks_on_every_rank() -> None:
    found = run_turns(statistics, 8)
    everyone = [times_ms(rank) for rank in range(8)]
    for ranks, own, tables, skipped in found:
        for label in (BATCH, SCHEDULE, FORWARD, WAIT, BACKWARD):
            values = [times.get(label, 0.0) for times in everyone]
            low, high, holder, mean = ranks[label]
            assert (low, high, holder) == (min(values), max(values), values.index(max(values)))
            assert math.isclose(mean, sum(values) / 8)
        assert ranks[BATCH].max_rank == 3 and ranks[FORWARD].max_rank == 5 and ranks[WAIT].max_rank == 0
        assert own == [own_ms(times) for times in everyone]
        assert skipped == 1 + 3
        assert set(tables) == {TIMERS, MEMORY} and tables[TIMERS].keys() == {BATCH, SCHEDULE, FORWARD, WAIT}
        assert tables[MEMORY]["peak"].max > 0 and isinstance(tables[TIMERS][BATCH], Spread)
    assert set(found[0][0]) >= {*PHASES, *map(ExposedComm, SETS)}
