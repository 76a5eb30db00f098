"""What a schedule would have taken, if every computation of a stage had taken the time that was measured on average.

What a measured timeline has on top of it are transfers, the work between two actions, and that no two are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import mean

from megatron3d.pipeline.actions import Action, Kind, Schedule
from megatron3d.pipeline.simulate import Timeline, simulate_durations


def mean_times(measured: Timeline) -> Mapping[tuple[Kind, int], float]:
    """The mean time of each kind of computation of each stage."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    return {key: mean(values) for key, values in times.items()}


def predicted(schedule: Schedule, measured: Timeline) -> Timeline:
    """The schedule's timeline with the measured mean times, and transfers that take none."""
    times = mean_times(measured)

    def duration(action: Action) -> float:
        return times[action.kind, action.stage]

    return simulate_durations(schedule, duration)
