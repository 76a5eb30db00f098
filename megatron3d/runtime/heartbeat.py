"""Heartbeat of a rank, the store that it is published in, and the diagnosis that compares those of all ranks.

    1. a heartbeat that is not renewed                        that rank is dead or stopped, or its machine is gone
    2. else, a rank that has not started a collective that
       another one waits for, and itself waits for nobody     it keeps the others waiting
    3. else, ranks that call different collectives
    4. else, a rank outside any collective                    it keeps the others waiting
    5. else, the rank with fewest collectives

A rank waits for those that have started fewer collectives of one group than it waits for; this also holds where kernels
wait and programs run on, as with NCCL.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

CONNECT_TIMEOUT = timedelta(seconds=10)


class StatusStore(Protocol):
    """Texts by key, shared by all ranks; every method raises OSError if the store cannot be reached."""

    def set(self, key: str, text: str) -> None:
        """Store `text` under `key`, replacing an earlier value."""

    def get(self, key: str) -> str | None:
        """Return the text stored under `key`, or None."""

    def claim(self, key: str) -> bool:
        """Return whether this rank is the first to claim `key`."""

    def count(self, key: str, more: int) -> int:
        """Add to the count under `key`, which starts at 0, and return the sum of all ranks."""


class TcpStatusStore:
    """`StatusStore` on the TCP store of the rendezvous, over a connection of its own.

    Args:
        attempt: how often the launcher has restarted the ranks; values of earlier attempts are not seen.
    """

    def __init__(self, address: str, port: int, attempt: int) -> None:
        import torch.distributed as dist

        server = dist.TCPStore(address, port, is_master=False, timeout=CONNECT_TIMEOUT)  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"status/{attempt}", server)  # type: ignore[attr-defined]

    def set(self, key: str, text: str) -> None:
        with _faults():
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        with _faults():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def claim(self, key: str) -> bool:
        return self.count(key, 1) == 1

    def count(self, key: str, more: int) -> int:
        with _faults():
            return int(self._store.add(key, more))


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Raise torch's RuntimeError of a lost connection as OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


# Where a rank is whose main thread waits in a collective.
COLLECTIVES_FILES = (
    *("comm/process_comm.py", "comm/process_groups.py", "comm/objects.py", "comm/peer_link.py"),
    "runtime/waits.py",
)
SILENT, LATE = "does not answer", "keeps the others waiting"
MAX_RANKS_NAMED = 8
MAX_RANKS_AT_FAULT = 32


@dataclass(frozen=True)
class GroupStatus:
    """Collectives of one group on one rank: how many it has started and waited for, and the last of each."""

    started: int
    started_op: str
    waited: int = 0
    waited_op: str = ""


@dataclass(frozen=True)
class CollectiveStatus:
    """Collectives of one rank: how many it has started, the last one, and the status of each group by name."""

    num_started: int = 0
    last: str = ""
    groups: Mapping[str, GroupStatus] = field(default_factory=dict)


@dataclass(frozen=True)
class Heartbeat:
    """Status that a rank publishes.

    Attributes:
        sequence: number of this heartbeat; one that does not grow is of a dead rank.
        pid: process id.
        num_collectives: collectives started so far.
        last_collective: name, axes and number of the last one, empty before the first.
        stack: innermost frames of this package in the main thread, and in that of the backward, outermost first; None
            as long as iteration and collectives change.
        idle_s: seconds since iteration, collectives or stack changed.
        groups: status of each group, by a name that is the same on all its ranks.
    """

    sequence: int
    host: str
    pid: int
    iteration: int | None
    num_collectives: int
    last_collective: str
    stack: tuple[str, ...] | None
    idle_s: float
    groups: Mapping[str, GroupStatus] = field(default_factory=dict)

    @property
    def in_collective(self) -> bool:
        """Whether the rank is known to wait in a collective."""
        return self.stack is not None and bool(self.stack) and self.stack[-1].startswith(COLLECTIVES_FILES)

    @property
    def location(self) -> str:
        """Iteration, stack and last collective in words."""
        when = "before the first iteration" if self.iteration is None else f"after iteration {self.iteration}"
        last = f"last collective {self.last_collective}" if self.last_collective else "no collective yet"
        where = "" if self.stack is None else f", in {' > '.join(self.stack) or 'no frame of megatron3d'}"
        return f"{when}{where}; {last}"

    @property
    def process(self) -> str:
        """Host and process id in words."""
        return f"(host {self.host}, process {self.pid})"

    def __str__(self) -> str:
        return f"{self.location}; for {self.idle_s:.0f} s"

    @staticmethod
    def from_json(text: str) -> Heartbeat:
        """Return the heartbeat that was written as `json.dumps(asdict(heartbeat))`."""
        values = json.loads(text)
        groups = {name: GroupStatus(**status) for name, status in values["groups"].items()}
        stack = None if values["stack"] is None else tuple(values["stack"])
        return Heartbeat(**{**values, "stack": stack, "groups": groups})


Heartbeats = Mapping[int, Heartbeat]


def diagnose(before: Mapping[int, Heartbeat | None], after: Mapping[int, Heartbeat | None]) -> Iterator[str]:
    """Compare two readings of all ranks' heartbeats: a line for each rank at fault, then where the others are."""
    at_fault, problem, alive = _compared(before, after)
    for rank in at_fault[:MAX_RANKS_AT_FAULT]:
        beat = after[rank]
        details = "and never sent a heartbeat" if beat is None else f"{beat.process}: {beat}"
        yield f"rank {rank} {problem} {details}"
    if len(at_fault) > MAX_RANKS_AT_FAULT:
        yield f"and {len(at_fault) - MAX_RANKS_AT_FAULT} more ranks: {named(at_fault[MAX_RANKS_AT_FAULT:])}"
    yield from _missing(alive, at_fault)
    yield from _different(alive)
    yield from _grouped_by_location({rank: beat for rank, beat in alive.items() if rank not in at_fault})


def culprits(before: Mapping[int, Heartbeat | None], after: Mapping[int, Heartbeat | None]) -> list[int]:
    """Return the ranks that others may go on without: those that do not answer, or keep the others waiting."""
    at_fault, problem, _ = _compared(before, after)
    return at_fault if problem in (SILENT, LATE) and len(at_fault) < len(after) else []


def _compared(
    before: Mapping[int, Heartbeat | None], after: Mapping[int, Heartbeat | None]
) -> tuple[list[int], str, dict[int, Heartbeat]]:
    """Return the ranks at fault, what is wrong with them, and the heartbeats of all ranks that answer."""
    silent = [rank for rank, beat in after.items() if beat is None or beat == before[rank]]
    alive = {rank: beat for rank, beat in after.items() if rank not in silent and beat is not None}
    at_fault, problem = (silent, SILENT) if silent else _blamed(alive)
    return at_fault, problem, alive


def named(ranks: Iterable[int]) -> str:
    """Return the ranks in words, not more than `MAX_RANKS_NAMED` of them by number."""
    found = list(ranks)
    shown = ", ".join(map(str, found[:MAX_RANKS_NAMED]))
    return shown + (f" and {len(found) - MAX_RANKS_NAMED} more" if len(found) > MAX_RANKS_NAMED else "")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {named(ranks)}"


def _blamed(alive: Heartbeats) -> tuple[list[int], str]:
    """Return the ranks at fault among ranks that all answer, and what is wrong with them."""
    computing = [rank for rank, beat in alive.items() if not beat.in_collective]
    if late := _late(alive):
        return late, LATE
    if computing and len(computing) < len(alive) and not list(_different(alive)):
        return computing, LATE
    progress = {rank: (beat.iteration or 0, beat.num_collectives) for rank, beat in alive.items()}
    least = [rank for rank, done in progress.items() if done == min(progress.values())]
    return least, "has done the least" if len(least) < len(alive) else "waits, as all do"


def _groups(alive: Heartbeats) -> dict[str, dict[int, GroupStatus]]:
    """Return the status of each group on each of its ranks that answer."""
    groups: dict[str, dict[int, GroupStatus]] = {}
    for rank, beat in alive.items():
        for name, status in beat.groups.items():
            groups.setdefault(name, {})[rank] = status
    return groups


def _late(alive: Heartbeats) -> list[int]:
    """Return the ranks that another one waits for, and that wait for nobody."""
    late, waiting = set[int](), set[int]()
    for members in _groups(alive).values():
        most, least = max(each.waited for each in members.values()), min(each.started for each in members.values())
        late.update(rank for rank, each in members.items() if each.started < most)
        waiting.update(rank for rank, each in members.items() if each.waited > least)
    return sorted(late - waiting)


def _missing(alive: Heartbeats, at_fault: Iterable[int]) -> Iterator[str]:
    """Yield, for each rank at fault, the collectives that other ranks wait for and that it has not started."""
    groups = _groups(alive)
    for rank in sorted(set(at_fault) & set(alive))[:MAX_RANKS_NAMED]:
        for name, members in groups.items():
            if rank not in members:
                continue
            mine, first = members[rank], max(members.values(), key=lambda each: each.waited)
            if mine.started < first.waited:
                waiting = [other for other, each in members.items() if each.waited > mine.started]
                last = f", the last {mine.started_op}" if mine.started_op else ""
                yield (
                    f"rank {rank} has started {mine.started} collectives over {name.partition('@')[0]}{last}; "
                    f"{_ranks(waiting)} wait{'s' * (len(waiting) == 1)} there for the "
                    f"{first.waited}th, {first.waited_op}"
                )


def _different(alive: Heartbeats) -> Iterator[str]:
    """Yield the groups whose ranks have started the same number of collectives, and differ in the last of them."""
    for name, members in _groups(alive).items():
        ops: dict[str, list[int]] = {}
        for rank, status in members.items():
            ops.setdefault(status.started_op, []).append(rank)
        is_same_number = len({status.started for status in members.values()}) == 1
        if is_same_number and len(ops) > 1 and set(ops) != {"send", "receive"}:
            calls = ", ".join(f"{op} on {_ranks(ranks)}" for op, ranks in ops.items())
            number = next(iter(members.values())).started
            yield f"ranks call different collectives over {name.partition('@')[0]}: the {number}th is {calls}"


def _grouped_by_location(heartbeats: Heartbeats) -> Iterator[str]:
    locations: dict[str, list[int]] = {}
    for rank, beat in heartbeats.items():
        locations.setdefault(beat.location, []).append(rank)
    for location, ranks in locations.items():
        yield f"{_ranks(ranks)}: {location}"
