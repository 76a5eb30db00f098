"""What a rank of a pipeline does, as values, written as torch.distributed.pipelining writes them in its CSV files.

<stage><kind><microbatch>      1F3  forward of stage 1 on microbatch 3        2B0  its whole backward
                               2I0  gradient of stage 2's input only          2W0  of its weights only
2SEND_F3  output of stage 2 to stage 3        3RECV_F3  the same at the other end
2SEND_B3  input gradient of stage 2 to 1      1RECV_B3  the same at the other end        2REDUCE_GRAD
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple


class ActionKind(str, Enum):
    """What is done: four computations, four transfers, and the sum of a stage's weight gradients over the data axis."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's name
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE_GRAD"


COMPUTATIONS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


class Action(NamedTuple):
    """One thing that the rank with `stage` does for microbatch `mb` (None: for all of them)."""

    kind: ActionKind
    stage: int
    mb: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.mb is None else self.mb}"


Schedule = tuple[tuple[Action, ...], ...]
RankOfStage = Callable[[int, int], int]

_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_TEXT = re.compile(rf"(\d+)({_KINDS})(\d*)")


def parse_action(text: str) -> Action:
    """The action that `text` stands for; ValueError if it is none."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or (match[2] == ActionKind.REDUCE.value) != (match[3] == ""):
        raise ValueError(f"{text!r} is no action such as 0F3, 1I2, 1W2 or 0B1: stage, kind, microbatch")
    return Action(ActionKind(match[2]), int(match[1]), int(match[3]) if match[3] else None)


def rank_in_loop(stage: int, num_ranks: int) -> int:
    """The rank of a stage that follows its predecessor round and round (Megatron's interleaving)."""
    return stage % num_ranks


def rank_in_v(stage: int, num_ranks: int) -> int:
    """The rank of a stage on the way down and up again: the first and the last stage share rank 0."""
    step, back = divmod(stage, num_ranks)
    return num_ranks - 1 - back if step % 2 else back


def stage_to_rank(schedule: Schedule) -> Mapping[int, int]:
    """The rank of every stage, in order of stages."""
    return dict(sorted({action.stage: rank for rank, actions in enumerate(schedule) for action in actions}.items()))


def forward_only(schedule: Schedule, m: int) -> Schedule:
    """The forwards of the first m microbatches alone, for what needs no gradients."""
    return tuple(tuple(a for a in actions if a.kind is ActionKind.F and a.mb in range(m)) for actions in schedule)


def keep_first_microbatches(schedule: Schedule, m: int) -> Schedule:
    """A valid schedule without the microbatches from m on, which is one too."""
    return tuple(tuple(a for a in actions if a.mb in range(m)) for actions in schedule)


def completed_by(action: Action) -> tuple[Action, ...]:
    """What is available when a computation is done: a whole backward is both of its halves."""
    if action.kind is ActionKind.B:
        return action._replace(kind=ActionKind.I), action._replace(kind=ActionKind.W)
    return (action,)


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The results that a computation consumes."""
    kind, stage, mb = action
    if kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, mb),) if stage else ()
    if kind is ActionKind.W:
        return (Action(ActionKind.I, stage, mb),)
    from_above = (Action(ActionKind.I, stage + 1, mb),) if stage + 1 < num_stages else ()
    return (Action(ActionKind.F, stage, mb), *from_above)


def activations_in_flight(actions: Iterable[Action], weight_share: float = 1.0) -> list[float]:
    """Activations that a rank holds after each of its actions, counted in microbatches of one stage.

    Forward adds one; of it, `weight_share` stays from the input gradient until the weight gradient.
    """
    change = {ActionKind.F: 1.0, ActionKind.B: -1.0, ActionKind.I: weight_share - 1.0, ActionKind.W: -weight_share}
    held, total = [], 0.0
    for action in actions:
        total += change.get(action.kind, 0.0)
        held.append(total)
    return held
