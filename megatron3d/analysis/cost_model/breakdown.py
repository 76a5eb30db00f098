"""Seconds by kind: what computes by what it is, and what waits for communication by the axes that it goes along."""

from __future__ import annotations

from collections.abc import Iterable

from megatron3d.parallel.exposed_comm import ExposedComm
from megatron3d.parallel.mesh import Axes

COMPUTATION, BUBBLE, UPDATE, DATA = "computation", "bubble", "update", "data"
PRODUCTS, ATTENTION, MEMORY, TAX = COMPUTE = ("products", "attention", "passes over memory", "slowed by transfers")


class TimeBreakdown(dict[str, float]):
    """Seconds by kind; adding joins them."""

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.values())

    @property
    def compute(self) -> float:
        """Seconds of what computes."""
        return sum(self.get(kind, 0.0) for kind in COMPUTE)

    def plus(self, *others: TimeBreakdown) -> TimeBreakdown:
        """The sum."""
        return combine((self, *others))

    def scaled(self, factor: float) -> TimeBreakdown:
        """Each of them multiplied."""
        return TimeBreakdown({kind: factor * seconds for kind, seconds in self.items()})


def combine(many: Iterable[TimeBreakdown]) -> TimeBreakdown:
    """The sum of many."""
    total = TimeBreakdown()
    for each in many:
        for kind, seconds in each.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def exposed_time(axes: Axes, seconds: float) -> TimeBreakdown:
    """Time that is spent waiting for a collective."""
    return TimeBreakdown({ExposedComm(axes): seconds}) if seconds > 0 else TimeBreakdown()


def is_exposed(kind: str) -> bool:
    """Whether a kind is waiting for communication."""
    return isinstance(kind, ExposedComm)


def exposed_axes(kind: str) -> Axes:
    """The axes that a wait's communication goes along."""
    assert isinstance(kind, ExposedComm), f"{kind} is no exposed communication"
    return kind.axes
