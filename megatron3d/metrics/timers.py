"""Timers of the phases of a step on each rank, which never wait for the device.

    batch-generator | forward-backward                                        | all-grads-sync | optimizer
                      forward-compute, backward-compute, else waiting
    along x·y         waiting for communication over these axes, within any of the phases above

Names are those of Megatron-LM's timers.  On a GPU the times are those of events in the device's stream, which are read
one step later, when they have completed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import Action, ActionKind

if TYPE_CHECKING:
    import torch

BATCH, SCHEDULE, GRADS, UPDATE = PARTS = ("batch-generator", "forward-backward", "all-grads-sync", "optimizer")
FORWARD, BACKWARD = COMPUTES = ("forward-compute", "backward-compute")
EVALUATE, SAVE, NOISE, FP8_LOSS = BETWEEN_STEPS = ("evaluate", "save-checkpoint", "noise-scale", "fp8-loss")
PHASES = (*PARTS, *COMPUTES, *BETWEEN_STEPS)
_COMPUTES_OF: Mapping[ActionKind, str] = {
    ActionKind.F: FORWARD,
    **dict.fromkeys((ActionKind.B, ActionKind.I, ActionKind.W), BACKWARD),
}
_NO_TIMER: AbstractContextManager[None] = contextlib.nullcontext()


class Clock(NamedTuple):
    """`stamp` returns a time stamp, `elapsed_ms` the milliseconds from one stamp to another."""

    stamp: Callable[[], Any]
    elapsed_ms: Callable[[Any, Any], float]


def clock(device: torch.device) -> Clock:
    """Return the host's clock for a CPU, and events in the current stream for an accelerator."""
    if device.type == "cpu":
        return Clock(time.perf_counter, lambda begin, end: 1e3 * (end - begin))
    import torch

    def stamp() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def elapsed(begin: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))

    return Clock(stamp, elapsed)


class _Interval:
    """Records the time stamps of the start and end of its body."""

    __slots__ = ("_begin", "_intervals", "_name", "_stamp")

    def __init__(self, name: str, stamp: Callable[[], Any], intervals: list[tuple[str, Any, Any]]) -> None:
        self._name, self._stamp = name, stamp
        self._intervals = intervals

    def __enter__(self) -> None:
        self._begin = self._stamp()

    def __exit__(self, *_: object) -> None:
        self._intervals.append((self._name, self._begin, self._stamp()))


class Timers:
    """Milliseconds by phase on this rank since the last `take`; nothing is timed if `is_off`."""

    def __init__(self, device: torch.device, is_off: bool = False) -> None:
        self._clock = clock(device)
        self._intervals: list[tuple[str, Any, Any]] = []
        self._num_older = 0
        self._is_off, self._is_paused = is_off, is_off
        self._total: dict[str, float] = {}

    def observe(self, what: Action | str) -> AbstractContextManager[None]:
        """Time the body if it is a phase or a computation of the pipeline."""
        name = what if isinstance(what, str) else _COMPUTES_OF.get(what.kind)
        return _NO_TIMER if name is None or self._is_paused else _Interval(name, self._clock.stamp, self._intervals)

    def waiting(self, axes: Axes) -> AbstractContextManager[None]:
        """Time the body, which waits for communication over `axes`."""
        return _NO_TIMER if self._is_paused else _Interval(ExposedComm(axes), self._clock.stamp, self._intervals)

    @contextlib.contextmanager
    def between_steps(self, name: str) -> Iterator[None]:
        """Time the body, which is no part of a step, by the host's clock; nothing within it is timed."""
        begin = time.perf_counter()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = self._is_off
            self._add(name, 1e3 * (time.perf_counter() - begin))

    def end_step(self) -> None:
        """Read the intervals of the step before this one, whose events have completed by now."""
        self._read(self._num_older)
        self._num_older = len(self._intervals)

    def discard_steps(self) -> None:
        """Discard the times of all steps so far, but not those of what came between them."""
        self._intervals.clear()
        self._num_older = 0
        self._total = {name: ms for name, ms in self._total.items() if name in BETWEEN_STEPS}

    def take(self, num_steps: int) -> dict[str, float]:
        """Return milliseconds by phase since the last call: means of `num_steps` steps, totals of the rest."""
        self._read(len(self._intervals))
        taken = {name: ms if name in BETWEEN_STEPS else ms / num_steps for name, ms in self._total.items()}
        self._num_older = 0
        self._total = {}
        return taken

    def _read(self, count: int) -> None:
        for name, begin, end in self._intervals[:count]:
            self._add(name, self._clock.elapsed_ms(begin, end))
        del self._intervals[:count]

    def _add(self, name: str, ms: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + ms


class Spread(NamedTuple):
    """Minimum, maximum and mean of a number over all ranks, and the rank of the maximum."""

    min: float
    max: float
    max_rank: int
    mean: float


def own_ms(times: Mapping[str, float]) -> float:
    """Return the milliseconds of a step on a rank without those in which it waits for other ranks."""
    parts = sum(times.get(name, 0.0) for name in PARTS)
    return parts - sum(ms for name, ms in times.items() if isinstance(name, ExposedComm))


def pipeline_bubble(phases_ms: Mapping[str, Spread]) -> float | None:
    """Return the bubble: 1 - mean over ranks of computing time / longest schedule; None if nothing ran."""
    longest = phases_ms[SCHEDULE].max
    busy = sum(phases_ms[name].mean for name in COMPUTES)
    return 1 - busy / longest if longest > 0 else None
