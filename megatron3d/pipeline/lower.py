"""From a schedule to what a rank executes: with transfers between ranks, and the sum of each stage's gradients.

NCCL has no tags: the n-th transfer that one end of a link posts meets the n-th of the other end.  All transfers are
therefore put in one global order, that of the times when their data exist, and every rank posts its own in that order:

    end of a computation  ->  its transfers, posted by both ends  ->  the computations that end later

Walking that order from its start, the next transfer always is the next of both its ends, so that nothing can wait in a
circle, even if every transfer blocked.  A receive comes before the computation that is under way when its data exist;
it may then be posted `ahead` of further computations, but never of another transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.pipeline.action_costs import Costs
from megatron3d.pipeline.actions import COMPUTATIONS, RECEIVES, SENDS, Action, ActionKind, Schedule, stage_to_rank
from megatron3d.pipeline.simulate import simulate

# Times that give the order of transfers.  Without a hop, results that cross each other would come to exist at the same
# time, in an order of chance that costs interleaved schedules up to a quarter of their time (see the test of links).
ORDERING = Costs(comm=0.01)

_FORWARD = ActionKind.SEND_F, ActionKind.RECV_F
_BACKWARD = ActionKind.SEND_B, ActionKind.RECV_B


class SendRecv(NamedTuple):
    """A tensor that crosses from one rank to another: the two actions that post it."""

    send: Action
    receive: Action


def send_recv_after(action: Action, where: Mapping[int, int]) -> SendRecv | None:
    """What has to be moved when `action` is done; None when the next stage is on the same rank, or there is none."""
    kind, stage, mb = action
    if kind is ActionKind.W:
        return None
    step, send, receive = (1, *_FORWARD) if kind is ActionKind.F else (-1, *_BACKWARD)
    if where.get(stage + step, where[stage]) == where[stage]:
        return None
    return SendRecv(Action(send, stage, mb), Action(receive, stage + step, mb))


def peer_rank(action: Action, where: Mapping[int, int]) -> int:
    """The rank at the other end of a SEND or RECV."""
    step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
    assert action.kind in (*SENDS, *RECEIVES), f"{action} is no transfer"
    return where[action.stage + step]


def count_transfers(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """How often each rank sends, and how often it receives, in a pass over all microbatches."""
    where = stage_to_rank(schedule)
    moved = [found for actions in schedule for action in actions if (found := send_recv_after(action, where))]
    senders, receivers = (Counter(where[each[end].stage] for each in moved) for end in (0, 1))
    return tuple((senders[rank], receivers[rank]) for rank in range(len(schedule)))


def lower(schedule: Schedule, ahead: int = 1) -> Schedule:
    """The lists that ranks execute: `schedule`, which must be valid, with SEND, RECV and REDUCE_GRAD put in.

    A SEND follows its computation, a REDUCE_GRAD the last weight gradient of its stage.  A RECV stands where it is
    posted; the computation that consumes what it brings waits for it.  `ahead` is the number of computations that a
    RECV is moved up over; with 0, a rank may even wait at every transfer.
    """
    where = stage_to_rank(schedule)
    lists: list[list[Action]] = [[] for _ in schedule]
    weights = (action for actions in schedule for action in actions if action.kind in (ActionKind.B, ActionKind.W))
    last = {action.stage: action for action in weights}
    for span in sorted(simulate(schedule, ORDERING).spans, key=lambda span: (span.end, span.rank)):
        action, mine = span.action, lists[span.rank]
        mine.append(action)
        if moved := send_recv_after(action, where):
            mine.append(moved.send)
            lists[where[moved.receive.stage]].append(moved.receive)
        if last.get(action.stage) == action:
            mine.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(tuple(_hoisted(actions, ahead)) for actions in lists)


def _hoisted(actions: list[Action], ahead: int) -> list[Action]:
    """`actions` with every receive before up to `ahead` computations that precede it without a transfer between."""
    out: list[Action] = []
    for action in actions:
        place = len(out)
        if action.kind in RECEIVES:
            while place > max(0, len(out) - ahead) and out[place - 1].kind in COMPUTATIONS:
                place -= 1
        out.insert(place, action)
    return out
