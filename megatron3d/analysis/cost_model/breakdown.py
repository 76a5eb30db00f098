"""Seconds by kind: what computes by what it is, and what waits for communication by the axes that it goes along."""

from __future__ import annotations

from collections.abc import Iterable

from megatron3d.parallel.mesh import Axes

COMPUTATION, BUBBLE, UPDATE, DATA, ALONG = "computation", "bubble", "update", "data", "along "
PRODUCTS, ATTENTION, MEMORY, TAX = COMPUTE = ("products", "attention", "passes over memory", "slowed by transfers")


class Times(dict[str, float]):
    """Seconds by kind; adding joins them."""

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.values())

    @property
    def compute(self) -> float:
        """Seconds of what computes."""
        return sum(self.get(kind, 0.0) for kind in COMPUTE)

    def plus(self, *others: Times) -> Times:
        """The sum."""
        return add((self, *others))

    def times(self, factor: float) -> Times:
        """Each of them multiplied."""
        return Times({kind: factor * seconds for kind, seconds in self.items()})


def add(many: Iterable[Times]) -> Times:
    """The sum of many."""
    total = Times()
    for each in many:
        for kind, seconds in each.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def waiting(axes: Axes, seconds: float) -> Times:
    """Time that is spent waiting for a collective."""
    return Times({ALONG + "·".join(axes): seconds}) if seconds > 0 else Times()


def is_wait(kind: str) -> bool:
    """Whether a kind is waiting for communication."""
    return kind.startswith(ALONG)


def axes_of(kind: str) -> Axes:
    """The axes that a wait's communication goes along."""
    return tuple(kind.removeprefix(ALONG).split("·"))
