"""Fact: one order of a schedule gives every computation the times that the event simulation gives it."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from megatron3d.pipeline.actions import Action, ActionKind, Schedule
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import Deadlock, StageKind, Timeline, execution_order, simulate_durations


def simulated(schedule: Schedule, seconds: Mapping[StageKind, float], hop: float) -> Timeline:
    return simulate_durations(schedule, lambda action: seconds[action.stage, action.kind], hop)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "num"), [(1, 1), (4, 3), (4, 9)])
def test_times_are_those_of_the_simulation(name: str, ranks: int, num: int) -> None:
    """Stages differ in their times, and a hop costs time, so that no wrong input of a computation is late by chance."""
    schedule, draw = build_schedule(name, ranks, num), Random(f"{name} {ranks} {num}")
    order = execution_order(schedule)
    for hop in (0.0, 0.4):
        seconds = {kind: draw.uniform(0.5, 2.0) for kind in order.kinds}
        line = simulated(schedule, seconds, hop)
        times = order.times_of_stages(seconds, hop)
        expected = sorted((span.start, span.end) for span in line.spans)
        assert sorted(zip(times.starts, times.ends, strict=True)) == expected
        assert (order.makespan(times), order.cost(times)) == (line.makespan, line.cost)
        for span in line.spans:
            if span.action == Action(ActionKind.F, span.action.stage, 0):
                assert times.starts[order.first_forwards[span.action.stage]] == span.start
        backward = [span for span in line.spans if span.action.kind in (ActionKind.B, ActionKind.W)]
        for stage, place in order.last_backwards.items():
            assert times.ends[place] == max(span.end for span in backward if span.action.stage == stage)


def test_a_schedule_that_cannot_run_is_no_order() -> None:
    with pytest.raises(Deadlock):
        execution_order(((Action(ActionKind.B, 0, 0), Action(ActionKind.F, 0, 0)),))
