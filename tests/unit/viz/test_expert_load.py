"""Fact: the report draws the load of experts of every layer and logged step, and nothing for a model without any."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatron3d.metrics.journal import FILE_NAME
from megatron3d.viz.curves import MAX_COLUMNS, draw_load, load_table
from megatron3d.viz.report import report


def steps(num: int) -> list[dict[str, Any]]:
    """Return logged steps whose second layer has the iteration as its load."""
    loads = ({"layers.1": {"max_load": 1.0}, "layers.3": {"max_load": float(step)}} for step in range(1, num + 1))
    return [{"iteration": step, "lm_loss": 1.0, "experts": load} for step, load in enumerate(loads, start=1)]


def test_a_cell_is_a_layer_in_a_step() -> None:
    layers, iterations, loads = load_table([*steps(3), {"iteration": 4, "lm_loss": 1.0}])
    assert (layers, iterations, loads) == (["layers.1", "layers.3"], [1, 2, 3], [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])


def test_many_steps_share_columns_of_their_largest_load() -> None:
    _, iterations, (_, loads) = load_table(steps(2 * MAX_COLUMNS + 1))
    assert iterations[:2] == [3, 6] and loads[:2] == [3.0, 6.0] and len(iterations) <= MAX_COLUMNS
    assert iterations[-1] == loads[-1] == 2 * MAX_COLUMNS + 1


def test_a_layer_that_logged_nothing_is_a_gap() -> None:
    rows = steps(2)
    del rows[0]["experts"]["layers.3"]
    _, _, loads = load_table(rows)
    assert sorted(map(str, loads[1])) == [str(2.0), str(math.nan)]


def test_the_report_has_the_picture(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text("".join(json.dumps(row) + "\n" for row in steps(4)))
    page = report(tmp_path)
    assert "Load of experts" in page and "layers.3" in page and "most tokens of an expert / mean" in page
    assert "data:image/png" in page, "cells are one picture inside of the page"
    path.write_text(json.dumps({"iteration": 1, "lm_loss": 1.0}) + "\n")
    assert "Load of experts" not in report(tmp_path) and draw_load([]) is None
