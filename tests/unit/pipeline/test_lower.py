"""Fact: both ends of every link post the same transfers in the same order, and no rank waits forever.

Three machines run the lowered lists without tags: one where every transfer blocks until the other end is ready, one
where transfers are posted and waited for only by their consumers, first in first out per pair of ranks (a NCCL
communicator), and one with a single queue per rank for all its transfers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.pipeline.actions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Costs,
    Schedule,
    completed_by,
    keep_first_microbatches,
    parse_action,
    stage_to_rank,
)
from megatron3d.pipeline.lower import lower, peer_rank, send_recv_after
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import simulate
from tests.support.dependencies import dependencies

Links = Mapping[tuple[int, int], list[str]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(list(SCHEDULES)))
    entry = SCHEDULES[name]
    v = draw(st.integers(entry.min_virtual, entry.max_virtual or 4))
    times = [draw(st.floats(0.2, 5)) for _ in range(4)]
    m = draw(st.integers(1, 24))
    schedule = build_schedule(name, draw(st.integers(1, 8)), m, v, Costs(*times))
    return keep_first_microbatches(schedule, draw(st.integers(1, m)))


def moved(action: Action) -> Action:
    """Return the name of the tensor that a SEND or RECV moves."""
    stage = action.stage + {ActionKind.RECV_F: -1, ActionKind.RECV_B: 1}.get(action.kind, 0)
    return Action(
        ActionKind.F if action.kind in (ActionKind.SEND_F, ActionKind.RECV_F) else ActionKind.I, stage, action.mb
    )


def computations(lowered: Schedule) -> Schedule:
    return tuple(tuple(action for action in actions if action.kind in COMPUTATIONS) for actions in lowered)


@given(schedule=schedules(), prefetch=st.integers(0, 3))
def test_lowering_inserts_only_transfers_and_reductions(schedule: Schedule, prefetch: int) -> None:
    lowered, where = lower(schedule, prefetch), stage_to_rank(schedule)
    assert computations(lowered) == schedule
    for rank, actions in enumerate(lowered):
        sends, receives = ([a for a in actions if a.kind in kinds] for kinds in (SENDS, RECEIVES))
        needs = {need for a in schedule[rank] for need in dependencies(a, len(where)) if where[need.stage] != rank}
        assert len(receives) == len(needs) and {moved(action) for action in receives} == needs
        assert len(set(sends)) == len(sends)
        for action in sends:
            before = actions[: actions.index(action)]
            assert any(moved(action) in completed_by(done) for done in before if done.kind in COMPUTATIONS)
            assert where[action.stage] == rank
    assert sum(a.kind in SENDS for x in lowered for a in x) == sum(a.kind in RECEIVES for x in lowered for a in x)


@given(schedule=schedules(), prefetch=st.integers(0, 3))
def test_both_ends_post_the_same_sequence(schedule: Schedule, prefetch: int) -> None:
    where = stage_to_rank(schedule)
    ends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(lower(schedule, prefetch)):
        for action in actions:
            if action.kind in (*SENDS, *RECEIVES):
                ends[rank, peer_rank(action, where)].append(moved(action))
    for (rank, other), sequence in ends.items():
        assert ends[other, rank] == sequence


@given(schedule=schedules(), prefetch=st.integers(1, 3))
def test_receives_move_before_few_computations(schedule: Schedule, prefetch: int) -> None:
    for early, late in zip(lower(schedule, prefetch), lower(schedule, prefetch=0), strict=True):
        first, second = ([a for a in x if a.kind not in COMPUTATIONS] for x in (early, late))
        assert first == second
        for action in first:
            before = [sum(a.kind in COMPUTATIONS for a in x[: x.index(action)]) for x in (early, late)]
            assert 0 <= before[1] - before[0] <= (prefetch if action.kind in RECEIVES else 0)


@given(schedule=schedules())
def test_reductions_follow_the_last_weight_gradient(schedule: Schedule) -> None:
    for actions in lower(schedule):
        for stage in {action.stage for action in actions}:
            mine = [action.kind for action in actions if action.stage == stage]
            sums = [place for place, kind in enumerate(mine) if kind is ActionKind.REDUCE]
            weights = [place for place, kind in enumerate(mine) if kind in (ActionKind.B, ActionKind.W)]
            assert len(sums) == 1 and sums[0] > weights[-1]
            assert not [kind for kind in mine[weights[-1] + 1 : sums[0]] if kind not in SENDS]


@given(schedule=schedules())
def test_no_deadlock_where_every_transfer_blocks(schedule: Schedule) -> None:
    where, lowered = stage_to_rank(schedule), lower(schedule, prefetch=0)
    at = [0] * len(lowered)

    def current(rank: int) -> Action | None:
        return lowered[rank][at[rank]] if at[rank] < len(lowered[rank]) else None

    progress = True
    while progress:
        progress = False
        for rank in range(len(lowered)):
            while (action := current(rank)) is not None:
                if action.kind in (*SENDS, *RECEIVES):
                    other = peer_rank(action, where)
                    across = current(other)
                    if across is None or across.kind in COMPUTATIONS or across.kind is ActionKind.REDUCE:
                        break
                    if peer_rank(across, where) != rank:
                        break
                    assert moved(across) == moved(action), f"{action} meets {across}"
                    at[other] += 1
                at[rank] += 1
                progress = True
    assert all(current(rank) is None for rank in range(len(lowered)))


class Machine:
    """Simulator of ranks that post transfers without blocking; one runs when it is first in the queues of both ends."""

    def __init__(self, lowered: Schedule, where: Mapping[int, int], costs: Costs, one_queue: bool) -> None:
        self.lowered, self.where, self.costs, self.one_queue = lowered, where, costs, one_queue
        self.at, self.free = [0] * len(lowered), [0.0] * len(lowered)
        self.there = [dict[Action, float]() for _ in lowered]
        self.queues: dict[tuple[int, int], list[tuple[Action, float]]] = defaultdict(list)
        self.queue_free: dict[tuple[int, int], float] = defaultdict(float)

    def run(self) -> float:
        """Return the time at which the last rank ends."""
        while any(self._step(rank) for rank in range(len(self.lowered))) or any(map(self._move, list(self.queues))):
            pass
        assert self.at == [len(actions) for actions in self.lowered] and not any(self.queues.values())
        return max(self.free)

    def _queue(self, rank: int, other: int) -> tuple[int, int]:
        return rank, -1 if self.one_queue else other

    def _step(self, rank: int) -> bool:
        if self.at[rank] == len(self.lowered[rank]):
            return False
        action = self.lowered[rank][self.at[rank]]
        if action.kind in COMPUTATIONS:
            needs = dependencies(action, len(self.where))
            if any(need not in self.there[rank] for need in needs):
                return False
            num_virtual = len(self.where) // len(self.lowered)
            start = max([self.free[rank], *(self.there[rank][need] for need in needs)])
            self.free[rank] = start + self.costs.duration(action.kind, num_virtual)
            self.there[rank] |= dict.fromkeys(completed_by(action), self.free[rank])
        elif action.kind is not ActionKind.REDUCE:
            self.queues[self._queue(rank, peer_rank(action, self.where))].append((action, self.free[rank]))
        self.at[rank] += 1
        return True

    def _move(self, mine: tuple[int, int]) -> bool:
        if not self.queues[mine] or self.queues[mine][0][0].kind not in SENDS:
            return False
        send, posted = self.queues[mine][0]
        other = peer_rank(send, self.where)
        theirs = self._queue(other, mine[0])
        if not self.queues[theirs] or peer_rank(self.queues[theirs][0][0], self.where) != mine[0]:
            return False
        receive, ready = self.queues[theirs][0]
        assert receive.kind in RECEIVES and moved(receive) == moved(send), f"{send} meets {receive}"
        end = max(posted, ready, self.queue_free[mine], self.queue_free[theirs]) + self.costs.comm
        self.queue_free[mine] = self.queue_free[theirs] = self.there[other][moved(send)] = end
        del self.queues[mine][0], self.queues[theirs][0]
        return True


@given(schedule=schedules(), prefetch=st.integers(0, 3), one_queue=st.booleans())
def test_no_deadlock_where_transfers_are_posted(schedule: Schedule, prefetch: int, one_queue: bool) -> None:
    Machine(lower(schedule, prefetch), stage_to_rank(schedule), Costs(), one_queue).run()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 8), (4, 11), (8, 16)])
@pytest.mark.parametrize("costs", [Costs(comm=0.1), Costs(I=1.2, W=0.9, comm=0.02), Costs(I=2, comm=0.05)])
def test_one_transfer_per_link_is_as_fast_as_no_queue(name: str, p: int, m: int, costs: Costs) -> None:
    """One transfer at a time per pair of ranks, in list order, is as fast as transfers without queues."""
    schedule = build_schedule(name, p, m, costs=costs)
    time = Machine(lower(schedule), stage_to_rank(schedule), costs, one_queue=False).run()
    assert time == pytest.approx(simulate(schedule, costs).makespan, rel=0.002)


def test_the_machine_detects_mismatched_transfers() -> None:
    """Two ends that post in different orders match the wrong transfer."""
    rows = ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    lowered = tuple(tuple(parse_action(text) for text in row.split()) for row in rows)
    with pytest.raises(AssertionError, match="0SEND_F0 meets 1RECV_F1"):
        Machine(lowered, {0: 0, 1: 1}, Costs(), one_queue=False).run()


def test_a_small_list() -> None:
    """On rank 0 of two, receives are posted one computation early, sends at once, the all-reduce last."""
    first, second = (" ".join(map(str, actions)) for actions in lower(build_schedule("1f1b", 2, 2)))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0REDUCE_GRAD"
    assert second == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"


def test_stages_of_one_rank_send_nothing() -> None:
    where = {0: 0, 1: 1, 2: 1, 3: 0}
    crossing = [
        text
        for text in ("0F5", "1F5", "2F5", "3F5", "3B5", "2I5", "1I5", "0B5")
        if send_recv_after(parse_action(text), where)
    ]
    assert crossing == ["0F5", "2F5", "3B5", "1I5"]
    assert all(a.kind in (*COMPUTATIONS, ActionKind.REDUCE) for a in lower(build_schedule("zb-v", 1, 3))[0])
