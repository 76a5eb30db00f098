"""A schedule as one order of its computations that respects all dependencies, to simulate many sets of durations.

The order does not depend on the durations: of each computation it is enough to know its rank, which duration it has,
and which computation of another rank it waits for.  Its inputs on its own rank came before it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from megatron3d.pipeline.actions import Action, ActionKind, Schedule, completed_by, dependencies, stage_to_rank

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

    @property
    def makespan(self) -> float:
        """Time from the first start on any rank to the last end on any rank."""
        return max(self.ends) - min(self.starts)


@dataclass
class ExecutionOrder:
    """Computations of a valid schedule, each behind its inputs.

    Attributes:
        actions, ranks: the computations in order, and the rank of each.
        waits_for: place in the order of the computation on another rank that each waits for; -1: none.
        kinds: the pairs of stage and kind of computation that there are; `kind_of` has the place of each one's pair.
        ends_of_ranks: places of the first and of the last computation of each rank.
        first_forwards, last_backwards: places by stage.
    """

    num_ranks: int
    actions: list[Action] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    kinds: dict[StageKind, int] = field(default_factory=dict)
    kind_of: list[int] = field(default_factory=list)
    ends_of_ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    first_forwards: dict[int, int] = field(default_factory=dict)
    last_backwards: dict[int, int] = field(default_factory=dict)

    def append(self, action: Action, rank: int, waits_for: int) -> None:
        """Append a computation, of which all inputs came before."""
        place, (kind, stage, _) = len(self.actions), action
        self.actions.append(action)
        self.ranks.append(rank)
        self.waits_for.append(waits_for)
        self.kind_of.append(self.kinds.setdefault((stage, kind), len(self.kinds)))
        self.ends_of_ranks[rank] = self.ends_of_ranks.get(rank, (place,))[0], place
        if kind is ActionKind.F:
            self.first_forwards.setdefault(stage, place)
        elif kind is not ActionKind.I:
            self.last_backwards[stage] = place

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


@lru_cache(maxsize=64)
def execution_order(schedule: Schedule) -> ExecutionOrder:
    """Return the order of a valid schedule's computations.  Raises Deadlock where no rank can continue.

    Ranks take turns, each running its list as far as it can; one that waits is skipped until its input is computed.
    """
    owners, order = stage_to_rank(schedule), ExecutionOrder(len(schedule))
    made, position = dict[Action, int](), [0] * len(schedule)
    waiting, turns = defaultdict[Action, list[int]](list), deque(range(len(schedule)))
    while turns:
        rank = turns.popleft()
        for action in schedule[rank][position[rank] :]:
            inputs = dependencies(action, len(owners))
            if missing := [each for each in inputs if each not in made]:
                waiting[missing[0]].append(rank)
                break
            sent = [made[each] for each in inputs if owners[each.stage] != rank]
            order.append(action, rank, max(sent, default=-1))
            position[rank] += 1
            for result in completed_by(action):
                made[result] = len(order.actions) - 1
                turns.extend(waiting.pop(result, ()))
    if waiting:
        raise Deadlock(
            tuple(sorted((rank, position[rank], action) for action, ranks in waiting.items() for rank in ranks))
        )
    return order
