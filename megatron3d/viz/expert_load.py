"""Load of experts over layers and steps of a run, as a heat map: the most tokens of an expert over the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from megatron3d.viz.curves import Rows

LOAD = "max_load"
# A row of more colours than this would be narrower than a point.
MAX_COLUMNS = 200


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
    figure.colorbar(mesh, ax=axes, label="most tokens of an expert / mean")
    return figure
