"""Where the time of a step goes on each rank, noted without waiting for anything.

    batch-generator | forward-backward                                        | all-grads-sync | optimizer
                      forward-compute, backward-compute, the rest is waiting
    along x·y         waiting for what is sent along these axes, in whichever of the others

Names are those of Megatron-LM's timers.  On a GPU the times are the device's own: events in its stream, which are read
a step later, when the device has long passed them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import Action, ActionKind

if TYPE_CHECKING:
    import torch

BATCH, SCHEDULE, GRADS, UPDATE = PARTS = ("batch-generator", "forward-backward", "all-grads-sync", "optimizer")
FORWARD, BACKWARD = COMPUTES = ("forward-compute", "backward-compute")
EVALUATE, SAVE = ASIDES = ("evaluate", "save-checkpoint")
PHASES = (*PARTS, *COMPUTES, *ASIDES)
_COMPUTES_OF: Mapping[ActionKind, str] = {
    ActionKind.F: FORWARD,
    ActionKind.B: BACKWARD,
    ActionKind.I: BACKWARD,
    ActionKind.W: BACKWARD,
}
_UNTIMED: AbstractContextManager[None] = contextlib.nullcontext()

Stamp = Callable[[], Any]
# Milliseconds from one stamp to another.
Since = Callable[[Any, Any], float]


def clock(device: torch.device) -> tuple[Stamp, Since]:
    """What notes the time, and what tells the milliseconds between two notes."""
    if device.type == "cpu":
        return time.perf_counter, lambda begin, end: 1e3 * (end - begin)
    import torch

    def stamp() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def elapsed(begin: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))

    return stamp, elapsed


def along(axes: Axes) -> str:
    """The name of what waits for these axes."""
    return f"along {'·'.join(axes)}"


class _Lap:
    """Notes the times at which its body begins and ends."""

    __slots__ = ("_begin", "_laps", "_name", "_stamp")

    def __init__(self, name: str, stamp: Stamp, laps: list[tuple[str, Any, Any]]) -> None:
        self._name, self._stamp, self._laps = name, stamp, laps

    def __enter__(self) -> None:
        self._begin = self._stamp()

    def __exit__(self, *_: object) -> None:
        self._laps.append((self._name, self._begin, self._stamp()))


class Timers:
    """Milliseconds by phase on this rank since `take` was last called; none where it `is_off`."""

    def __init__(self, device: torch.device, is_off: bool = False) -> None:
        self._stamp, self._since = clock(device)
        self._laps: list[tuple[str, Any, Any]] = []
        self._num_older, self._is_aside, self._is_off = 0, is_off, is_off
        self._total: dict[str, float] = {}

    def watch(self, what: Action | str) -> AbstractContextManager[None]:
        """Times the body, if it is a phase or a computation of the pipeline."""
        name = what if isinstance(what, str) else _COMPUTES_OF.get(what.kind)
        return _UNTIMED if name is None or self._is_aside else _Lap(name, self._stamp, self._laps)

    def waiting(self, axes: Axes) -> AbstractContextManager[None]:
        """Times the body, which waits for what is sent along `axes`."""
        return _UNTIMED if self._is_aside else _Lap(along(axes), self._stamp, self._laps)

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Times the body by the host's clock, as something between steps in which nothing else is timed."""
        begin, self._is_aside = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_aside = self._is_off
            self._add(name, 1e3 * (time.perf_counter() - begin))

    def end_step(self) -> None:
        """Add up what is older than this step: a device has passed it by now."""
        self._add_up(self._num_older)
        self._num_older = len(self._laps)

    def forget(self) -> None:
        """Leave out all steps so far, but not what came between them."""
        self._laps.clear()
        self._num_older = 0
        self._total = {name: ms for name, ms in self._total.items() if name in ASIDES}

    def take(self, num_steps: int) -> dict[str, float]:
        """Milliseconds by phase since this was last called: of one of so many steps, or of all that came between."""
        self._add_up(len(self._laps))
        taken = {name: ms if name in ASIDES else ms / num_steps for name, ms in self._total.items()}
        self._num_older, self._total = 0, {}
        return taken

    def _add_up(self, count: int) -> None:
        for name, begin, end in self._laps[:count]:
            self._add(name, self._since(begin, end))
        del self._laps[:count]

    def _add(self, name: str, ms: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + ms


class Spread(NamedTuple):
    """A number over all ranks, and the rank where it is largest."""

    min: float
    max: float
    max_rank: int
    mean: float


def spread(values: Sequence[float]) -> Spread:
    """Of every rank's number, in rank order."""
    largest = max(values)
    return Spread(min(values), largest, values.index(largest), sum(values) / len(values))


def own_ms(times: Mapping[str, float]) -> float:
    """Milliseconds of a step that a rank is itself to blame for: without those that it waits for others."""
    parts = sum(times.get(name, 0.0) for name in PARTS)
    return parts - sum(ms for name, ms in times.items() if name.startswith("along "))


def pipeline_bubble(ranks: Sequence[Mapping[str, float]]) -> float | None:
    """The idle part of the schedule's time: 1 - mean over ranks of computing / longest time; None if nothing ran."""
    longest = max(times.get(SCHEDULE, 0.0) for times in ranks)
    busy = sum(times.get(name, 0.0) for times in ranks for name in COMPUTES) / len(ranks)
    return 1 - busy / longest if longest > 0 else None
