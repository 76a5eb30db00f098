"""Discrete-event simulation of a schedule: start and end of every computation when each rank runs its list in order.

A computation starts when its rank is free and its inputs have arrived: at the end of the computations that produced
them, plus one hop where these ran on another rank.  Transfers overlap with computation and never wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import NamedTuple

from megatron3d.pipeline.action_costs import UNIT_COSTS, Costs
from megatron3d.pipeline.actions import Action, ActionKind, Schedule, activations_in_flight, stage_to_rank
from megatron3d.pipeline.execution_order import execution_order


class Span(NamedTuple):
    """Start and end of a computation on a rank, predicted or measured."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one pass over all microbatches."""

    spans: tuple[Span, ...]

    @cached_property
    def rank_spans(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each rank, in order of time."""
        ranks: list[list[Span]] = [[] for _ in range(1 + max(span.rank for span in self.spans))]
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            ranks[span.rank].append(span)
        return tuple(map(tuple, ranks))

    @property
    def makespan(self) -> float:
        """Time from the first start on any rank to the last end on any rank."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def cost(self) -> float:
        """Longest time of a rank from its own first start to its own last end, the cost of the zero-bubble paper."""
        return max(spans[-1].end - spans[0].start for spans in self.rank_spans if spans)

    @property
    def busy(self) -> float:
        """Mean time over ranks that a rank computes."""
        return sum(span.end - span.start for span in self.spans) / len(self.rank_spans)

    @property
    def bubble(self) -> float:
        """Idle time of the slowest rank: `cost` minus `busy`."""
        return self.cost - self.busy

    @property
    def bubble_rate(self) -> float:
        """The bubble as a fraction of the cost (Qi et al. 2023, arXiv:2401.10241)."""
        return self.bubble / self.cost

    @property
    def idle_rate(self) -> float:
        """Idle fraction of the makespan: the bubble if all ranks synchronize before the optimizer step."""
        return 1 - self.busy / self.makespan


def num_virtual_stages(schedule: Schedule) -> int:
    """Return v, the largest number of stages on a rank."""
    ranks = list(stage_to_rank(schedule).values())
    return max(ranks.count(rank) for rank in set(ranks))


def simulate_durations(schedule: Schedule, duration: Callable[[Action], float], hop: float = 0.0) -> Timeline:
    """Return the timeline of a valid schedule, given the time of each computation and of a send to another rank."""
    order = execution_order(schedule)
    times = order.times(map(duration, order.actions), hop)
    return Timeline(tuple(map(Span, order.ranks, order.actions, times.starts, times.ends)))


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Return the timeline of a valid schedule; each of the v stages of a rank takes a v-th of the rank's costs."""
    v = num_virtual_stages(schedule)
    return simulate_durations(schedule, lambda action: costs.duration(action.kind, v), costs.comm)


def makespan(schedule: Schedule, costs: Costs = UNIT_COSTS) -> float:
    """Return the makespan of the timeline that `simulate` returns, without its spans."""
    order, v = execution_order(schedule), num_virtual_stages(schedule)
    times = order.times_of_stages({(stage, kind): costs.duration(kind, v) for stage, kind in order.kinds}, costs.comm)
    return order.makespan(times)


def mean_durations(measured: Timeline) -> Mapping[tuple[ActionKind, int], float]:
    """Return the mean measured time of each kind of computation of each stage."""
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    return {key: mean(values) for key, values in times.items()}


def simulate_mean_durations(schedule: Schedule, measured: Timeline) -> Timeline:
    """Return the timeline that the schedule has with the measured mean durations and send/recv that take no time.

    The difference to the measured timeline is send/recv, the work between two actions, and the variance of durations.
    """
    times = mean_durations(measured)
    return simulate_durations(schedule, lambda action: times[action.kind, action.stage])


def peak_activations(schedule: Schedule, wgrad_fraction: float = 1.0) -> tuple[float, ...]:
    """Return the peak of activations on each rank, in activations of one microbatch of one stage (1/v of the rank's).

    A microbatch counts from its forward to the end of its backward, and as `wgrad_fraction` between its dgrad and its
    wgrad (1: the upper bound of the zero-bubble paper's table 2; M_W / M_B there, about a third with attention).
    """
    return tuple(max(activations_in_flight(actions, wgrad_fraction), default=0.0) for actions in schedule)
