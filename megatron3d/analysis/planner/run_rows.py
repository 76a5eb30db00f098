"""A run of this framework as a row for predictions: its configuration, its ranks, and the seconds that a step took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron3d.config.read import read_config
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.metrics.journal import FILE_NAME, read_journal

# Sections of a configuration that determine the time of a step.
SECTIONS = ("model", "parallel", "train", "optimizer")


def row_of_run(folder: Path, cluster: str | None = None) -> dict[str, Any]:
    """Return the row of a run's folder: its last launch, with the median of its logged steps as `measured_s`.

    The first logged line of a launch, which compiles and warms up, and lines of smaller or shorter batches are left
    out.  Raises UserError if the folder is no run's, no step is left, or no cluster is known.
    """
    config = read_config(folder / "config.yaml").config
    name = cluster or config.logging.cluster
    if name is None:
        raise UserError(f"{folder}: the run's cluster is not known; give --cluster, such as eos or local")
    rows = read_journal(folder / FILE_NAME)
    launches = [place for place, row in enumerate(rows) if {"world_size", "model"} <= {*row.get("start", ())}]
    if not launches:
        raise UserError(f"{folder / FILE_NAME}: no launch with its ranks is logged; give the folder of a newer run")
    start, logged = rows[launches[-1]]["start"], rows[launches[-1] + 1 :]
    values = _values(config) | {"model.vocab_size": start["model"]["vocab_size"]}
    row: dict[str, Any] = {"config": values, "cluster": name, "num_gpus": start["world_size"]}
    return row | {"measured_s": _step_s(folder, config, logged), "run": str(folder)}


def _step_s(folder: Path, config: Config, logged: Sequence[dict[str, Any]]) -> float:
    whole = {"global_batch_size": config.train.global_batch_size, "seq_length": config.model.seq_length}
    steps = [row for row in logged if "lm_loss" in row and "elapsed_ms" in row][1:]
    times = [row["elapsed_ms"] / 1e3 for row in steps if all(row.get(key) == size for key, size in whole.items())]
    if not times:
        raise UserError(f"{folder / FILE_NAME}: no step of whole batches after the first line; let the run go on")
    return float(median(times))


def _values(config: Config) -> dict[str, Any]:
    """Return the values by key that are not the defaults."""
    changed = json.loads(config.model_dump_json(exclude_defaults=True))
    return {f"{section}.{key}": value for section in SECTIONS for key, value in changed.get(section, {}).items()}
