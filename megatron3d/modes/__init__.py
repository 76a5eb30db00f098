"""The tensor-parallel modes by name and form.  A new mode is a file beside this one and an entry here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron3d.modes import cube, grid, one_d, two_d, two_five_d
from megatron3d.modes.mode import Mode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModeEntry:
    """How a mode is asked for: names of its axes, its forms (the first is the default), and its shape for a size."""

    axis_names: tuple[str, ...]
    forms: Mapping[str, Callable[[Shape], Mode]]
    default_shape: Callable[[int], Shape]


def _balanced(num_axes: int) -> Callable[[int], Shape]:
    """The most even factorization; larger factors go to later (faster) axes."""

    def shape(size: int) -> Shape:
        out: Shape = ()
        for remaining in range(num_axes, 1, -1):
            fair = size ** (1 / remaining)
            side = max(d for d in range(1, int(fair + 1e-9) + 1) if size % d == 0)
            out, size = (*out, side), size // side
        return (*out, size)

    return shape


def _square_with_depth(size: int) -> Shape:
    """The largest r = c such that d = size / r^2 is whole."""
    side = max(q for q in range(1, math.isqrt(size) + 1) if size % (q * q) == 0)
    return size // side**2, side, side


MODES: Mapping[str, ModeEntry] = {
    "1d": ModeEntry(
        ("t",), {"replicated": one_d.replicated, "sequence_parallel": one_d.sequence_parallel}, lambda size: (size,)
    ),
    "2d": ModeEntry(("r", "c"), {"summa": two_d.summa, "weight_stationary": two_d.weight_stationary}, _balanced(2)),
    "2.5d": ModeEntry(
        ("d", "r", "c"),
        {"summa": two_five_d.summa, "weight_stationary": two_five_d.weight_stationary},
        _square_with_depth,
    ),
    "3d": ModeEntry(("x", "y", "z"), {"heads": cube.heads, "tokens": cube.tokens}, _balanced(3)),
    "grid": ModeEntry(("x", "y", "z"), {"all_reduce": grid.all_reduce, "scatter": grid.scatter}, _balanced(3)),
}


def build_mode(name: str, form: str | None, shape: Shape) -> Mode:
    """The mode `name` in `form` (None: its first form) with axes of the sizes `shape`."""
    entry = MODES[name]
    return entry.forms[form or next(iter(entry.forms))](shape)
