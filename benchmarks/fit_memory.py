"""Fit what a practice's allocator reserves: weighted least squares on the relative errors of published runs.

The table says what rank 0 reserved, which is on the first pipeline rank.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import numpy as np
from fit_rows import nanotron_config

from megatron3d.analysis.cost_model.practices import PROFILES
from megatron3d.analysis.cost_model.stage_division import divided_as
from megatron3d.analysis.cost_model.step import simulated_specs
from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.rank import rank_memory
from megatron3d.analysis.memory_model.reserved import num_logits
from megatron3d.analysis.memory_model.step_spec import make_step_spec
from megatron3d.config.run_spec import RunSpec

Vector = np.ndarray
TERMS = ("state_memory", "activation_memory", "logit_memory")
LEAST = np.array([1.0, 1.0, 0.0])
HUBER, ROUNDS = 0.1, 20


class Reserved(NamedTuple):
    """Bytes of a run's state, of its activations and transient peak, number of its logits, and bytes reserved."""

    state: float
    activations: float
    logits: float
    measured: float


def nanotron_memory(path: Path) -> Iterator[Reserved]:
    """Yield all finished runs of nanotron's table."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] != "Success":
                continue
            spec = divided_as(RunSpec(nanotron_config(row), 8 * int(float(row["nodes"]))), PROFILES["nanotron"])
            step = make_step_spec(simulated_specs(spec)[0], KERNELS["gpu"]).on_pipeline_rank(0)
            memory = rank_memory(step)
            moving = memory.activations + memory.categories["moment"]
            yield Reserved(memory.total - moving, moving, num_logits(step), float(row["Mem Res (GB)"]) * 2**30)


def fitted(rows: Vector) -> Vector:
    """Return the terms with the least Huber loss of relative errors, none below its least value."""
    parts, free = rows[:, :3] / rows[:, 3:], np.ones(3, bool)
    while True:
        found: Vector = LEAST.copy()
        weights = np.ones(len(rows))
        for _ in range(ROUNDS):
            rest = 1 - parts[:, ~free] @ LEAST[~free]
            found[free] = np.linalg.lstsq(parts[:, free] * weights[:, None], rest * weights, rcond=None)[0]
            weights = np.sqrt(1 / np.maximum(1, np.abs(parts @ found - 1) / HUBER))
        if not (low := free & (found < LEAST)).any():
            return found
        free &= ~low


def fit_memory(path: Path, folds: int) -> tuple[dict[str, float | tuple[float, float]], str]:
    """Return the terms of nanotron's memory with their percentiles, and a line about their errors in the folds."""
    rows = np.array(list(nanotron_memory(path)))
    ratios = np.zeros(len(rows))
    for fold in range(folds):
        out = np.arange(len(rows)) % folds == fold
        ratios[out] = rows[out, 3] / (rows[out, :3] @ fitted(rows[~out]))
    low, *_, high = quantiles(ratios, n=10)
    terms = {name: float(f"{value:.3g}") for name, value in zip(TERMS, fitted(rows), strict=True)}
    bare = _told("without terms", rows[:, 3] / rows[:, :2].sum(1))
    return terms | {"memory_spread": (round(float(low), 3), round(float(high), 3))}, bare + "; " + _told(
        f"{folds} folds", ratios
    )


def _told(name: str, ratios: Vector) -> str:
    sizes = np.abs(1 / ratios - 1)
    values = sizes.mean(), np.median(sizes), sizes.max(), np.median(ratios) - 1
    told = "mean {:.1%}, median {:.1%}, worst {:.0%}, bias {:+.1%}".format(*values)
    return f"memory of nanotron, {len(ratios)} runs, {name}: {told}"
