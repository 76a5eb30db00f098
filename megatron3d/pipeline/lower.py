"""Lowering of a schedule: add send/recv between ranks and the gradient reduction of each stage to every rank's list.

NCCL has no message tags: the n-th transfer that one end of a link posts matches the n-th of the other end.  All
transfers are therefore put in one global order, that of the simulated times at which their data exist, and every rank
posts its own transfers in that order:

    end of a computation  ->  its transfer, posted by both ends  ->  the computations that end later

The first unfinished transfer in that order is always the next one of both its ends, so that no cycle of waiting ranks
can exist, even if every transfer blocked.  A RECV is posted before the computation that runs when its data come to
exist; `prefetch` posts it further computations earlier, but never before another transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from megatron3d.pipeline.actions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Costs,
    Schedule,
    stage_to_rank,
)
from megatron3d.pipeline.simulate import execution_order, num_virtual_stages

# Costs that order the transfers.  With a hop of 0, transfers in opposite directions would tie, and ties broken at
# random cost interleaved schedules up to a quarter of their time (see the test of links).
ORDERING_COSTS = Costs(comm=0.01)


class SendRecv(NamedTuple):
    """Transfer of a tensor from one rank to another: the two actions that post it."""

    send: Action
    receive: Action


def send_recv_of(action: Action) -> SendRecv:
    """Return the transfer of the result of a forward or a dgrad to the next stage, as if another rank had that."""
    kind, stage, mb = action
    if kind is ActionKind.F:
        return SendRecv(Action(ActionKind.SEND_F, stage, mb), Action(ActionKind.RECV_F, stage + 1, mb))
    return SendRecv(Action(ActionKind.SEND_B, stage, mb), Action(ActionKind.RECV_B, stage - 1, mb))


def send_recv_after(action: Action, owners: Mapping[int, int]) -> SendRecv | None:
    """Return the transfer of a computation's result, given the rank of every stage; None where none else needs it."""
    if action.kind is ActionKind.W:
        return None
    pair, mine = send_recv_of(action), owners[action.stage]
    return None if owners.get(pair.receive.stage, mine) == mine else pair


def peer_rank(action: Action, owners: Mapping[int, int]) -> int:
    """Return the pipeline rank at the other end of a SEND or RECV."""
    step = 1 if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1
    assert action.kind in (*SENDS, *RECEIVES), f"{action} is no transfer"
    return owners[action.stage + step]


def count_transfers(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return (number of sends, number of receives) of each rank in one pass over all microbatches."""
    owners = stage_to_rank(schedule)
    transfers = [pair for actions in schedule for action in actions if (pair := send_recv_after(action, owners))]
    senders = Counter(owners[pair.send.stage] for pair in transfers)
    receivers = Counter(owners[pair.receive.stage] for pair in transfers)
    return tuple((senders[rank], receivers[rank]) for rank in range(len(schedule)))


@lru_cache(maxsize=16)
def lower(schedule: Schedule, prefetch: int = 1) -> Schedule:
    """Return the lists that ranks execute: a valid schedule with SEND, RECV and REDUCE_GRAD added.

    A SEND follows the computation that produces its data, a REDUCE_GRAD the last weight gradient of its stage.  A RECV
    stands where it is posted; the computation that consumes its data waits for it.

    Args:
        prefetch: number of computations by which a RECV is posted earlier; with 0 a rank may wait for every transfer.
    """
    owners = stage_to_rank(schedule)
    lists: list[list[Action]] = [[] for _ in schedule]
    weight_grads = (a for actions in schedule for a in actions if a.kind in (ActionKind.B, ActionKind.W))
    last_weight_grad = {action.stage: action for action in weight_grads}
    order, costs, v = execution_order(schedule), ORDERING_COSTS, num_virtual_stages(schedule)
    seconds = {(stage, kind): costs.duration(kind, v) for stage, kind in order.kinds}
    ends = order.times_of_stages(seconds, costs.comm).ends
    for _, rank, place in sorted(zip(ends, order.ranks, range(len(ends)), strict=True)):
        action, rank_list = order.actions[place], lists[rank]
        rank_list.append(action)
        if pair := send_recv_after(action, owners):
            rank_list.append(pair.send)
            lists[owners[pair.receive.stage]].append(pair.receive)
        if last_weight_grad.get(action.stage) == action:
            rank_list.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(tuple(_post_receives_earlier(actions, prefetch)) for actions in lists)


def _post_receives_earlier(actions: list[Action], prefetch: int) -> list[Action]:
    """Move every RECV before up to `prefetch` computations that precede it, without passing another transfer."""
    out: list[Action] = []
    for action in actions:
        place = len(out)
        if action.kind in RECEIVES:
            while place > max(0, len(out) - prefetch) and out[place - 1].kind in COMPUTATIONS:
                place -= 1
        out.insert(place, action)
    return out
