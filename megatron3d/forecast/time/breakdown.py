"""Time breakdown of a step: seconds of computation by kind, and of exposed communication by mesh axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.parallel.mesh import Axes

COMPUTATION, BUBBLE = "computation", "bubble"
UPDATE, LOADING = "update", "data"
# GEMMs, fused attention, memory-bound kernels, the slowdown of computation by communication that overlaps with it,
# and kernels that the host launches late.
GEMMS, ATTENTION, MEMORY, SLOWDOWN, HOST = COMPUTE = (
    *("GEMMs", "attention", "memory-bound kernels", "slowed by overlap"),
    "waiting for the host",
)


class TimeBreakdown(dict[str, float]):
    """Seconds by kind."""

    @property
    def total(self) -> float:
        """Sum over all kinds, in seconds."""
        return sum(self.values())

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return sum(self.get(kind, 0.0) for kind in COMPUTE)

    def plus(self, *others: TimeBreakdown) -> TimeBreakdown:
        """Return the sum of this breakdown and others."""
        return combine((self, *others))

    def scaled(self, factor: float) -> TimeBreakdown:
        """Return this breakdown with every kind multiplied by `factor`."""
        return TimeBreakdown({kind: factor * seconds for kind, seconds in self.items()})


def combine(many: Iterable[TimeBreakdown]) -> TimeBreakdown:
    """Return the sum of breakdowns."""
    total = TimeBreakdown()
    for each in many:
        for kind, seconds in each.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def exposed_time(axes: Axes, seconds: float) -> TimeBreakdown:
    """Return a breakdown with exposed communication over `axes`; empty for 0 seconds."""
    return TimeBreakdown({ExposedComm(axes): seconds}) if seconds > 0 else TimeBreakdown()


def is_exposed(kind: str) -> bool:
    """Return whether a kind is exposed communication."""
    return isinstance(kind, ExposedComm)


def exposed_axes(kind: str) -> Axes:
    """Return the axes of a kind of exposed communication."""
    assert isinstance(kind, ExposedComm), f"{kind} is no exposed communication"
    return kind.axes


@dataclass(frozen=True)
class TimePrediction:
    """Predicted step time, with its breakdown on the busiest pipeline rank.

    Attributes:
        step_s: seconds of the whole step.
        parts: computation by kind and exposed communication by axes, of that rank.
        bubble_s: seconds in which that rank is idle in the pipeline.
        optimizer_s: seconds of the optimizer step.
    """

    step_s: float
    parts: TimeBreakdown
    bubble_s: float
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of computation, the optimizer step not included."""
        return self.parts.compute

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of exposed communication, by axes."""
        return {kind: seconds for kind, seconds in self.parts.items() if is_exposed(kind)}

    @property
    def breakdown(self) -> TimeBreakdown:
        """Seconds of every part of the step by kind, the largest first."""
        parts = {**self.parts, BUBBLE: self.bubble_s, UPDATE: self.optimizer_s}
        return TimeBreakdown(sorted(parts.items(), key=lambda item: -item[1]))
