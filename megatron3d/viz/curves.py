"""Training curves of one or several runs: a panel per quantity, a colour per run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron3d.errors import UserError
from megatron3d.metrics.journal import FILE_NAME, read_journal
from megatron3d.runtime.limits import shorten

Rows = list[dict[str, Any]]


class Panel(NamedTuple):
    """Keys of metrics.jsonl that are drawn together, and the unit that they are divided by."""

    title: str
    keys: tuple[str, ...]
    unit: float = 1.0


PANELS = (
    Panel("loss", ("lm_loss", "validation_loss")),
    Panel("learning rate", ("learning_rate",)),
    Panel("gradient norm", ("grad_norm",)),
    Panel("tokens per second", ("tokens_per_s",)),
    Panel("milliseconds per step", ("elapsed_ms",)),
    Panel("peak memory of a rank (GB)", ("peak_memory_bytes",), 1e9),
)
STYLES = {"validation_loss": "o--"}


def read_run(folder: Path) -> Rows:
    """Return the rows of a run's metrics.jsonl; raise UserError if no step was logged, or a curve has no numbers."""
    path = folder / FILE_NAME
    rows = read_journal(path)
    for row, key in product(rows, chain(*(panel.keys for panel in PANELS))):
        if not _is_number(value := row.get(key, 0.0)):
            raise UserError(
                f"{path}: {key} of iteration {row['iteration']} is {shorten(repr(value))}, not a number; repair the "
                "line, or move the file away"
            )
    if not any("lm_loss" in row for row in rows):
        raise UserError(f"{path}: holds no training step yet; give a run that has logged at least one")
    return rows


def _is_number(value: object) -> bool:
    return value is None or (type(value) is int and abs(value) < 2**63) or type(value) is float


@contextmanager
def row_errors(folder: Path) -> Iterator[None]:
    """Raise UserError where rows lack keys that a run writes, or have values of other types."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        why = shorten(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{folder / FILE_NAME}: its rows are not those that a run writes ({why}); repair it, or move it away"
        ) from error


def draw(runs: Mapping[str, Rows]) -> Figure:
    """Return a figure with the curves of the runs by name."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            for key in panel.keys:
                _curve(axes, rows, key, panel.unit, f"C{number}", name)
        axes.set_title(panel.title)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def _curve(axes: Axes, rows: Rows, key: str, unit: float, colour: str, name: str) -> None:
    """Draw one quantity of one run, if it was ever logged."""
    points = [(row["iteration"], row[key] / unit) for row in rows if row.get(key) is not None]
    if points:
        kind = " (validation)" if key == "validation_loss" else ""
        axes.plot(
            *zip(*points, strict=True),
            STYLES.get(key, "-"),
            color=colour,
            label=name.replace("$", r"\$") + kind,
            markersize=4,
        )
