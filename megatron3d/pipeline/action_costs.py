"""Costs of the actions of one microbatch: the five times from which a schedule is simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron3d.errors import UserError
from megatron3d.pipeline.actions import ActionKind
from megatron3d.runtime.limits import shorten

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
