"""Discrete-event simulation of a schedule: start and end of every computation when each rank runs its list in order.

A computation starts when its rank is free and its inputs have arrived: at the end of the computations that produced
them, plus one hop where these ran on another rank.  Transfers overlap with computation and never wait for each other.
The order of an event's inputs does not depend on durations, so one order serves many sets of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count, islice
from operator import itemgetter
from statistics import mean
from typing import NamedTuple

from megatron3d.pipeline.actions import (
    UNIT_COSTS,
    Action,
    ActionKind,
    Costs,
    Schedule,
    activations_in_flight,
    stage_to_rank,
)

StageKind = tuple[int, ActionKind]


class Deadlock(Exception):
    """Ranks that cannot continue, as (rank, position in its list, action that it waits for)."""

    def __init__(self, stuck: tuple[tuple[int, int, Action], ...]) -> None:
        super().__init__(f"no rank can continue: {stuck}")
        self.stuck = stuck


class Times(NamedTuple):
    """Start and end of every computation of an order."""

    starts: list[float]
    ends: list[float]


@dataclass(frozen=True, eq=False)
class ExecutionOrder:
    """Computations of a valid schedule, each behind its inputs.

    Attributes:
        actions, ranks: the computations in order, and the rank of each.
        waits_for: place in the order of the computation on another rank that each waits for; -1: none.
    """

    num_ranks: int
    actions: Sequence[Action]
    ranks: Sequence[int]
    waits_for: Sequence[int]

    @cached_property
    def kinds(self) -> Mapping[StageKind, int]:
        """The pairs of stage and kind of computation that there are, numbered."""
        return {kind: number for number, kind in enumerate(dict.fromkeys(map(itemgetter(1, 0), self.actions)))}

    @cached_property
    def kind_of(self) -> Sequence[int]:
        """The number in `kinds` of each computation."""
        return list(map(self.kinds.__getitem__, map(itemgetter(1, 0), self.actions)))

    @cached_property
    def ends_of_ranks(self) -> Mapping[int, tuple[int, int]]:
        """Places of the first and of the last computation of each rank."""
        firsts, lasts = _first_places(self.ranks), _last_places(self.ranks)
        return {rank: (first, lasts[rank]) for rank, first in firsts.items()}

    @cached_property
    def first_forwards(self) -> Mapping[int, int]:
        """Place of the first forward of each stage."""
        places = _first_places(self.kind_of)
        return {stage: places[number] for (stage, kind), number in self.kinds.items() if kind is ActionKind.F}

    @cached_property
    def last_backwards(self) -> Mapping[int, int]:
        """Place of the last backward of each stage; if it is split, of the last weight gradient."""
        places, ends = _last_places(self.kind_of), (ActionKind.B, ActionKind.W)
        found = [(places[number], stage) for (stage, kind), number in self.kinds.items() if kind in ends]
        return {stage: place for place, stage in sorted(found)}

    def times(self, durations: Iterable[float], hop: float = 0.0) -> Times:
        """Return when each computation starts and ends, given how long each takes, in order.

        A computation starts when its rank is free and its inputs have arrived, those of other ranks `hop` later.
        """
        free_at = [0.0] * self.num_ranks
        starts, ends = list[float](), list[float]()
        for rank, waits_for, duration in zip(self.ranks, self.waits_for, durations, strict=True):
            start = free_at[rank]
            if waits_for >= 0 and (arrives := ends[waits_for] + hop) > start:
                start = arrives
            starts.append(start)
            ends.append(start + duration)
            free_at[rank] = start + duration
        return Times(starts, ends)

    def times_of_stages(self, seconds: Mapping[StageKind, float], hop: float = 0.0) -> Times:
        """Return the times where each kind of computation of a stage takes as long for every microbatch."""
        each = [seconds[kind] for kind in self.kinds]
        return self.times(map(each.__getitem__, self.kind_of), hop)

    def cost(self, times: Times) -> float:
        """Return the longest time of a rank from its own first start to its own last end."""
        return max(times.ends[last] - times.starts[first] for first, last in self.ends_of_ranks.values())

    def makespan(self, times: Times) -> float:
        """Return the time from the first start on any rank to the last end on any rank."""
        firsts, lasts = zip(*self.ends_of_ranks.values(), strict=True)
        return max(map(times.ends.__getitem__, lasts)) - min(map(times.starts.__getitem__, firsts))


@lru_cache(maxsize=64)
def of_one_microbatch(schedule: Schedule) -> Sequence[Sequence[StageKind]]:
    """Return the computations of a microbatch on each rank, in their order."""
    return [[(stage, kind) for kind, stage, mb in actions if mb == 0] for actions in schedule]


class StageTimes(NamedTuple):
    """Makespan and cost of an order, and start and end of each stage's first forward and last backward."""

    makespan: float
    cost: float
    firsts: Mapping[int, tuple[float, float]]
    lasts: Mapping[int, tuple[float, float]]


@lru_cache(maxsize=64)
def times_of_order(order: ExecutionOrder, durations: tuple[float, ...], hop: float) -> StageTimes:
    """Return the times of an order, given how long each of its `kinds` takes.

    Layouts that differ in ZeRO stage alone have the same.
    """
    times = order.times(map(durations.__getitem__, order.kind_of), hop)
    firsts, lasts = (
        {stage: (times.starts[place], times.ends[place]) for stage, place in table.items()}
        for table in (order.first_forwards, order.last_backwards)
    )
    return StageTimes(order.makespan(times), order.cost(times), firsts, lasts)


def _first_places(values: Sequence[int]) -> dict[int, int]:
    return dict(zip(reversed(values), reversed(range(len(values))), strict=True))


def _last_places(values: Sequence[int]) -> dict[int, int]:
    return dict(zip(values, count(), strict=False))


@lru_cache(maxsize=256)
def execution_order(schedule: Schedule) -> ExecutionOrder:
    """Return the order of a valid schedule's computations.  Raises Deadlock where no rank can continue.

    Ranks take turns, each running its list as far as it can; one that waits is skipped until its input is computed.

    Results are numbered: the forward of stage s of n on microbatch m is 2 (m n + s), its input gradient one more.
    """
    num_stages, position = len(stage_to_rank(schedule)), [0] * len(schedule)
    actions, ranks, waits_for = list[Action](), list[int](), list[int]()
    made = {_NONE: _NONE}  # places of results by their numbers
    waiting, turns = defaultdict[int, list[int]](list), deque(range(len(schedule)))
    while turns:
        rank, before = turns.popleft(), len(actions)
        for action in islice(schedule[rank], position[rank], None):
            kind, stage, mb = action
            assert mb is not None, "a computation is of a microbatch"
            number = result = 2 * (mb * num_stages + stage)
            # Of this rank and microbatch, and of another stage.
            if kind is ActionKind.F:
                own, other = _NONE, number - 2 if stage else _NONE
            elif kind is ActionKind.W:
                own, other, result = number + 1, _NONE, _NONE
            else:
                own, other, result = number, number + 3 if stage + 1 < num_stages else _NONE, number + 1
            if own not in made or other not in made:
                waiting[other if own in made else own].append(rank)
                break
            place = made[other]
            waits_for.append(place if place != _NONE and ranks[place] != rank else _NONE)
            if result != _NONE:
                made[result] = len(actions)
                turns.extend(waiting.pop(result, ()))
            actions.append(action)
            ranks.append(rank)
        position[rank] += len(actions) - before
    if waiting:
        stuck = [(rank, position[rank], _result(number, num_stages)) for number in waiting for rank in waiting[number]]
        raise Deadlock(tuple(sorted(stuck)))
    return ExecutionOrder(len(schedule), actions, ranks, waits_for)


# Number and place of no result.
_NONE = -1


def _result(number: int, num_stages: int) -> Action:
    mb, stage = divmod(number // 2, num_stages)
    return Action(ActionKind.I if number % 2 else ActionKind.F, stage, mb)


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


def simulate_mean_durations(schedule: Schedule, measured: Timeline) -> Timeline:
    """Return the timeline that the schedule has with the measured mean durations and send/recv that take no time.

    The difference to the measured timeline is send/recv, the work between two actions, and the variance of durations.
    """
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    means = {key: mean(values) for key, values in times.items()}
    return simulate_durations(schedule, lambda action: means[action.kind, action.stage])


def peak_activations(schedule: Schedule, wgrad_fraction: float = 1.0) -> tuple[float, ...]:
    """Return the peak of activations on each rank, in activations of one microbatch of one stage (1/v of the rank's).

    A microbatch counts from its forward to the end of its backward, and as `wgrad_fraction` between its dgrad and its
    wgrad (1: the upper bound of the zero-bubble paper's table 2; M_W / M_B there, about a third with attention).
    """
    return tuple(max(activations_in_flight(actions, wgrad_fraction), default=0.0) for actions in schedule)
