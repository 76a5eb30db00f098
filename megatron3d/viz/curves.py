"""Training curves of one or several runs: a panel per quantity, a colour per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullLocator

from megatron3d.errors import UserError, one_line
from megatron3d.metrics.journal import FILE_NAME, read_journal

Rows = list[dict[str, Any]]


class Panel(NamedTuple):
    """Keys of metrics.jsonl that are drawn together, the unit that they are divided by, and whether axes begin at 0."""

    title: str
    keys: tuple[str, ...]
    unit: float = 1.0
    from_zero: bool = False


PANELS = (
    Panel("loss", ("lm_loss", "validation_loss")),
    Panel("learning rate", ("learning_rate",)),
    Panel("gradient norm", ("grad_norm",)),
    Panel("tokens per second", ("tokens_per_s",)),
    Panel("milliseconds per step", ("elapsed_ms",)),
    Panel("peak memory of a rank (GB)", ("peak_memory_bytes",), 1e9, from_zero=True),
)
STYLES = {"validation_loss": "o--"}
# Larger values, as of a diverged run in fp64, are gaps like NaN: axes overflow.
MAX_DRAWN = 1e300


def read_run(folder: Path) -> Rows:
    """Return the rows of a run's metrics.jsonl; raise UserError if no step was logged."""
    path = folder / FILE_NAME
    rows = read_journal(path)
    if not any("lm_loss" in row for row in rows):
        raise UserError(f"{path}: holds no training step yet; give a run that has logged at least one")
    return rows


def draw(runs: Mapping[str, Rows]) -> Figure:
    """Return a figure with the curves of the runs by name."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            for key in panel.keys:
                _curve(axes, rows, key, panel.unit, f"C{number}", name)
        axes.set_title(panel.title)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if panel.from_zero:
            axes.set_ylim(0.0, 1.1 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def _curve(axes: Axes, rows: Rows, key: str, unit: float, colour: str, name: str) -> None:
    """Draw one quantity of one run, if it was ever logged."""
    points = [(row["iteration"], row[key] / unit) for row in rows if row.get(key) is not None]
    points = [(x, y if abs(y) < MAX_DRAWN else math.nan) for x, y in points]
    if points:
        kind = " (validation)" if key == "validation_loss" else ""
        axes.plot(
            *zip(*points, strict=True),
            STYLES.get(key, "-"),
            color=colour,
            label=one_line(name).replace("$", r"\$") + kind,
            markersize=4,
        )


LOAD = "max_load"
# A row of more colours than this would be narrower than a point.
MAX_COLUMNS = 200
# Loads that have a tick, and their multiples by powers of ten.
LOAD_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


def load_table(steps: Rows) -> tuple[list[str], list[int], list[list[float]]]:
    """Return the layers with experts, the last iteration of each column, and the loads [layers][columns].

    A column is the largest load of neighbouring logged steps where there are more of them than columns; NaN where a
    layer has none.  Without experts all three are empty.
    """
    logged = [row for row in steps if row.get("experts")]
    layers = list(dict.fromkeys(name for row in logged for name in row["experts"]))
    width = max(math.ceil(len(logged) / MAX_COLUMNS), 1)
    columns = [logged[start : start + width] for start in range(0, len(logged), width)]
    loads = [[_largest(column, name) for column in columns] for name in layers]
    return layers, [column[-1]["iteration"] for column in columns], loads


def _largest(rows: Rows, layer: str) -> float:
    found: list[Mapping[str, Any]] = [row["experts"][layer] for row in rows if layer in row["experts"]]
    return max((float(each[LOAD]) for each in found), default=math.nan)


def draw_load(steps: Rows) -> Figure | None:
    """Return the heat map of a run's logged steps; None if its model has no experts."""
    layers, iterations, loads = load_table(steps)
    if not layers:
        return None
    figure = Figure(figsize=(14, 1.5 + 0.25 * len(layers)), layout="constrained")
    axes = figure.subplots()
    top = max((load for row in loads for load in row if math.isfinite(load)), default=1.0)
    colours = LogNorm(1.0, max(top, 2.0))
    mesh = axes.pcolormesh(range(len(iterations) + 1), range(len(layers) + 1), loads, norm=colours, cmap="viridis")
    mesh.set_rasterized(True)
    axes.set_yticks([place + 0.5 for place in range(len(layers))], layers)
    shown = range(0, len(iterations), max(len(iterations) // 10, 1))
    axes.set_xticks([place + 0.5 for place in shown], [str(iterations[place]) for place in shown])
    axes.invert_yaxis()
    axes.set_xlabel("iteration")
    axes.set_title("most tokens of an expert / mean", fontsize="medium")
    ticks = [tick for power in range(10) for each in LOAD_TICKS if (tick := each * 10**power) <= colours.vmax]
    bar = figure.colorbar(mesh, ax=axes, ticks=FixedLocator(ticks), format=FormatStrFormatter("%g"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    return figure
