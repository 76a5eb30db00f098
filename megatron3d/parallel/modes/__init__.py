"""The tensor-parallel modes by name and form.  A new mode is a file in this folder and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron3d.parallel.modes import grid, one_d, three_d, two_d, two_five_d
from megatron3d.parallel.modes.mode import Mode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModeEntry:
    """A mode as configured: its axis names, its forms (the first is the default), and the default shape of a size."""

    axis_names: tuple[str, ...]
    forms: Mapping[str, Callable[[Shape], Mode]]
    default_shape: Callable[[int], Shape]


def factorizations(size: int, num_axes: int) -> Iterator[Shape]:
    """Yield every shape of `num_axes` axes on `size` ranks."""
    if num_axes == 1:
        yield (size,)
        return
    for side in (n for n in range(1, size + 1) if size % n == 0):
        yield from ((side, *rest) for rest in factorizations(size // side, num_axes - 1))


def _balanced(num_axes: int) -> Callable[[int], Shape]:
    """Return a function to the factorization with the smallest sum, larger factors on later (faster) axes."""
    return lambda size: min(factorizations(size, num_axes), key=lambda shape: (sum(shape), shape))


def _square_with_depth(size: int) -> Shape:
    """Return the most even d, q, q, with depth d <= q where possible (Wang et al. 2021, section 3.1)."""
    shapes = (shape for shape in factorizations(size, 3) if shape[1] == shape[2])
    return min(shapes, key=lambda shape: (shape[0] > shape[1], sum(shape)))


MODES: Mapping[str, ModeEntry] = {
    one_d.ONE_D: ModeEntry(
        ("t",), {"replicated": one_d.replicated, "sequence_parallel": one_d.sequence_parallel}, lambda size: (size,)
    ),
    "2d": ModeEntry(("r", "c"), {"summa": two_d.summa, "weight_stationary": two_d.weight_stationary}, _balanced(2)),
    "2.5d": ModeEntry(
        ("d", "r", "c"),
        {"summa": two_five_d.summa, "weight_stationary": two_five_d.weight_stationary},
        _square_with_depth,
    ),
    "3d": ModeEntry(("x", "y", "z"), {"heads": three_d.heads, "tokens": three_d.tokens}, _balanced(3)),
    "grid": ModeEntry(("x", "y", "z"), {"all_reduce": grid.all_reduce, "scatter": grid.scatter}, _balanced(3)),
}


def build_mode(name: str, form: str | None, shape: Shape) -> Mode:
    """Return the mode `name` in `form` (None: its first form) with axes of the sizes `shape`."""
    entry = MODES[name]
    return entry.forms[form or next(iter(entry.forms))](shape)
