"""Actions of a pipeline rank as values, in the text format of torch.distributed.pipelining's CSV files.

<stage><kind><microbatch>      1F3  forward of stage 1 on microbatch 3        2B0  full backward
2I0  its input gradient (dgrad) only           2W0  its weight gradient (wgrad) only
2SEND_F3  send the output of stage 2 to 3      3RECV_F3  receive it on stage 3
2SEND_B3  send the dgrad of stage 2 to 1       1RECV_B3  receive it on stage 1
2REDUCE_GRAD  reduce the weight gradients of stage 2 over the data axis
(0F3;1B2)OVERLAP_F_B  a forward and a backward, of which torch's runtime too starts the second after the first
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from megatron3d.errors import UserError
from megatron3d.runtime.arguments import shorten


class ActionKind(str, Enum):
    """Kind of an action: four computations, four transfers, and the data-parallel gradient reduction of a stage."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's name
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE_GRAD"

    __hash__ = str.__hash__  # enum's own is a function in Python, and a simulation hashes each action a dozen times


COMPUTATIONS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


class Action(NamedTuple):
    """One action of the rank that owns `stage`, for microbatch `mb` (None: for all microbatches)."""

    kind: ActionKind
    stage: int
    mb: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.mb is None else self.mb}"


Schedule = tuple[tuple[Action, ...], ...]
RankOfStage = Callable[[int, int], int]

_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_TEXT = re.compile(rf"([0-9]{{1,18}})({_KINDS})([0-9]{{0,18}})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_OVERLAPPED = ({ActionKind.F, ActionKind.B}, {ActionKind.F, ActionKind.I})


def parse_action(text: str) -> Action:
    """Parse an action such as `1F3`.  Raises ValueError where `text` is none."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or (match[2] == ActionKind.REDUCE.value) != (match[3] == ""):
        raise ValueError(f"{shorten(text)!r} is no action such as 0F3, 1I2, 1W2 or 0B1: stage, kind, microbatch")
    return Action(ActionKind(match[2]), int(match[1]), int(match[3]) if match[3] else None)


def parse_cell(text: str) -> tuple[Action, ...]:
    """Parse a cell of a schedule: an action, or the two of `(0F1;1B0)OVERLAP_F_B` in their order.

    Raises ValueError where `text` is neither.
    """
    pair = _PAIR.fullmatch(text.strip())
    if pair is None:
        return (parse_action(text),)
    actions = parse_action(pair[1]), parse_action(pair[2])
    if {action.kind for action in actions} not in _OVERLAPPED:
        raise ValueError(f"{shorten(text)!r} is no forward with a backward; write (0F1;1B0)OVERLAP_F_B, or two cells")
    return actions


def rank_in_loop(stage: int, num_ranks: int) -> int:
    """Return the rank of a stage if stages are assigned round robin (Megatron's interleaving)."""
    return stage % num_ranks


def rank_in_v(stage: int, num_ranks: int) -> int:
    """Return the rank of a stage in a V: stages go down the ranks and up again; rank 0 has the first and the last."""
    chunk, position = divmod(stage, num_ranks)
    return num_ranks - 1 - position if chunk % 2 else position


@lru_cache(maxsize=64)
def stage_to_rank(schedule: Schedule) -> Mapping[int, int]:
    """Return the rank of every stage, in order of stages."""
    held = [set(map(itemgetter(1), actions)) for actions in schedule]
    return dict(sorted((stage, rank) for rank, stages in enumerate(held) for stage in stages))


def forward_only(schedule: Schedule, m: int) -> Schedule:
    """Return the forwards of the first m microbatches, for evaluation and generation."""
    return tuple(tuple(a for a in actions if a.kind is ActionKind.F and a.mb in range(m)) for actions in schedule)


def keep_first_microbatches(schedule: Schedule, m: int) -> Schedule:
    """Return the schedule without the microbatches from m on; a valid schedule stays valid."""
    return tuple(tuple(a for a in actions if a.mb in range(m)) for actions in schedule)


def completed_by(action: Action) -> tuple[Action, ...]:
    """Return the computations that an action completes: a full backward completes both the dgrad and the wgrad."""
    if action.kind is ActionKind.B:
        return Action(ActionKind.I, *action[1:]), Action(ActionKind.W, *action[1:])
    return (action,)


def activations_in_flight(actions: Iterable[Action], wgrad_fraction: float = 1.0) -> list[float]:
    """Return the activations held after each action of a rank, in activations of one microbatch of one stage.

    A forward adds one; the dgrad frees all but `wgrad_fraction` of it, and the wgrad frees the rest.
    """
    change = {ActionKind.F: 1.0, ActionKind.B: -1.0, ActionKind.I: wgrad_fraction - 1.0, ActionKind.W: -wgrad_fraction}
    held, total = [], 0.0
    for action in actions:
        total += change.get(action.kind, 0.0)
        held.append(total)
    return held


# Costs that a person may give, so that ratios and sums of them stay exact enough.
LEAST, MOST = 1e-6, 1e6


@dataclass(frozen=True)
class Costs:
    """Times of forward (F), input gradient (I), weight gradient (W), full backward (B), one hop between ranks (comm).

    In any unit, for all v stages of a rank together; each of them takes a v-th.  B is I + W unless given.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741  the field's name
    W: float = 1.0
    B: float | None = None
    comm: float = 0.0

    def __post_init__(self) -> None:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in named.items() if value is not None}
        UserError.collect(
            f"cost {name}={value:g}: must be {'at least' if name == 'comm' else 'above'} 0; use {name}=1"
            for name, value in given.items()
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "comm")
        )

    @property
    def total(self) -> float:
        """Time that a rank computes for one microbatch when the backward is split."""
        return self.F + self.I + self.W

    def duration(self, kind: ActionKind, num_virtual_stages: int) -> float:
        """Return the time of a computation of one of the `num_virtual_stages` stages of a rank."""
        whole = self.I + self.W if self.B is None else self.B
        times = {ActionKind.F: self.F, ActionKind.I: self.I, ActionKind.W: self.W, ActionKind.B: whole}
        return times[kind] / num_virtual_stages


UNIT_COSTS = Costs()


def parse_costs(text: str) -> Costs:
    """Parse costs such as `F=1,B=2,I=1,W=1,comm=0.1`, each of them optional."""
    names = [field.name for field in fields(Costs)]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in names or name in values:
            rule = f"is not one of {', '.join(names)}, each once, as in F=1,B=2,comm=0.1"
            raise UserError(f"costs {shorten(text)}: {shorten(part)!r} {rule}")
        try:
            values[name] = float(number)
        except ValueError as error:
            raise UserError(f"costs {shorten(text)}: {shorten(part)!r} is no number; use {name}=1") from error
    UserError.collect(
        f"cost {name}={value:g}: must be {LEAST:g} to {MOST:g}; use another unit of time"
        for name, value in values.items()
        if value > MOST or 0 < value < LEAST
    )
    return Costs(**values)
