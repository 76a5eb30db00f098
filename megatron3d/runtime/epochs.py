"""Epochs of an elastic run: who trains together, what each process knows of the others, and who trains next."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron3d.errors import RunFailed


class Member(NamedTuple):
    """Process of an elastic run: its number, which is its first rank, and the ports of its store and its responder."""

    number: int
    host: str
    port: int
    responder: int
    machine: str
    pid: int

    @property
    def name(self) -> str:
        """Number, host and process id in words."""
        return f"{self.number} (host {self.machine}, process {self.pid})"


@dataclass(frozen=True)
class Epoch:
    """Processes that train together until one of them is lost, by their rank.

    Attributes:
        leader: the process whose store they meet at.
        layout: what the planner chose for them, which all of them get.
        lost: processes of the epoch before that were lost.
        spares: processes that wait.
        leaving: those of them that have something in memory, which they hand over before the others begin.
        slow: processes that get no rank any more while there are others.
        joined: all processes that came after the launch, of which the `new` ones came with this epoch.
        seconds: time that the leader took for each part of the decision.
    """

    number: int
    members: tuple[int, ...]
    leader: int = 0
    layout: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    joined: tuple[Member, ...] = ()
    new: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Epoch:
        """Return the epoch that was published as a dictionary."""
        lists = {name: tuple(values[name]) for name in ("members", "lost", "spares", "leaving", "slow", "new")}
        return Epoch(**{**values, **lists, "joined": tuple(Member(*each) for each in values["joined"])})


@dataclass(frozen=True)
class Note:
    """What a process signs in with: its try, the last epoch that it knows, and whom it knows to be lost.

    Attributes:
        holds: it has something of the training in memory.
        slow: those that it knows to be slow.
    """

    attempt: int
    epoch: Epoch
    lost: tuple[int, ...]
    holds: bool = False
    slow: tuple[int, ...] = ()

    @staticmethod
    def of(text: str | bytes) -> Note:
        """Return the note that was written as `json.dumps(asdict(note))`."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("lost", "slow")}
        return Note(**{**values, **lists, "epoch": Epoch.of(values["epoch"])})


class Planner(Protocol):
    """Chooses the layout of an epoch on at most N ranks: its number of ranks, and the layout."""

    def __call__(self, num_ranks: int) -> tuple[int, Mapping[str, Any]]: ...


def newest(notes: Mapping[int, Note]) -> Epoch:
    """Return the last epoch that any process knows."""
    return max((note.epoch for note in notes.values()), key=lambda epoch: epoch.number)


def choose(
    before: Epoch, here: Sequence[int], slow: Collection[int], plan: Planner, *, has_new: bool
) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """Return the processes of the next ranks and their layout, without slow ones where others can go on alone.

    Spares take the places of those that are lost; where there are not enough, or new ones, the planner decides.
    """
    fast = [each for each in here if each not in slow]
    if 0 < len(fast) < len(here):
        with contextlib.suppress(RunFailed):
            return choose(before, fast, (), plan, has_new=has_new)
    extra = [each for each in here if each not in before.members]
    num_ranks, layout = plan(len(here)) if has_new or len(here) < len(before.members) else (0, before.layout)
    if num_ranks <= len(before.members) <= len(here):
        return tuple(each if each in here else extra.pop(0) for each in before.members), before.layout
    survivors = [each for each in here if each in before.members]
    return tuple(sorted([*survivors, *extra][:num_ranks])), layout
