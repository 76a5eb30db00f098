"""Fit what a practice's allocator reserves: weighted least squares on the relative errors of published runs.

The table says what rank 0 reserved, which is on the first pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import numpy as np
from fit.fit_rows import is_mended, nanotron_config, nanotron_table

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.rank import bucket_copies, gathered_inputs, num_logits, rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.time.practices import PROFILES, FittedTerms, divided_as
from megatron3d.forecast.time.step import simulated_specs
from megatron3d.model.local_sizes import KERNELS

Vector = np.ndarray
TERMS = ("activation_memory", "logit_memory", "gathered_memory")
LEAST = np.array([1.0, 0.0, 0.0])
HUBER, ROUNDS = 0.1, 20


class Reserved(NamedTuple):
    """Bytes of a run's activations and transient peak, number of its logits, bytes of gathered inputs, of its state,
    and bytes reserved."""

    activations: float
    logits: float
    gathered: float
    state: float
    measured: float


def nanotron_memory(path: Path) -> Iterator[tuple[Reserved, bool]]:
    """Yield all finished runs of nanotron's table, and whether their pipeline engine was mended."""
    profile = PROFILES["nanotron"]
    for row in nanotron_table(path):
        spec = divided_as(RunSpec(nanotron_config(row), 8 * int(float(row["nodes"]))), profile)
        step = make_step_spec(simulated_specs(spec)[0], KERNELS["gpu"]).on_pipeline_rank(0)
        memory = rank_memory(step)
        moving = memory.activations + memory.categories["moment"]
        state = memory.total - moving + bucket_copies(memory, step, profile)
        measured = float(row["Mem Res (GB)"]) * 2**30
        yield Reserved(moving, num_logits(step), gathered_inputs(step), state, measured), is_mended(row)


def judged_fits(path: Path, terms: FittedTerms) -> str:
    """Return how many runs that ran out of memory do not fit by the prediction."""
    found: Counter[tuple[bool, bool]] = Counter()
    for status in ("Success", "OOM"):
        for row in nanotron_table(path, status):
            profile = replace(PROFILES["nanotron"], fitted=terms)
            config, num_gpus = nanotron_config(row), 8 * int(float(row["nodes"]))
            problem = PlanningProblem(config, int(row["vocab_size"]), "eos", num_gpus, profile)
            spec = problem.spec(config)
            fits = problem.memory(spec).total + problem.library_bytes(spec) <= problem.memory_bytes
            found[status == "OOM", fits] += 1
    failed, refused = sum(found[True, fits] for fits in (True, False)), found[True, False] + found[False, False]
    return (
        f"{found[True, False]} of {failed} runs out of memory do not fit (recall {found[True, False] / failed:.1%}), "
        f"which is {found[True, False] / refused:.1%} of those that do not fit (precision)"
    )


def fitted(rows: Vector) -> Vector:
    """Return the terms with the least Huber loss of relative errors, none below its least value."""
    (parts, state), free = np.split(rows[:, :4] / rows[:, 4:], [3], axis=1), np.ones(3, bool)
    while True:
        found: Vector = LEAST.copy()
        weights = np.ones(len(rows))
        for _ in range(ROUNDS):
            rest = 1 - state[:, 0] - parts[:, ~free] @ LEAST[~free]
            found[free] = np.linalg.lstsq(parts[:, free] * weights[:, None], rest * weights, rcond=None)[0]
            weights = np.sqrt(1 / np.maximum(1, np.abs(parts @ found + state[:, 0] - 1) / HUBER))
        if not (low := free & (found < LEAST)).any():
            return found
        free &= ~low


def fit_memory(path: Path, folds: int) -> tuple[dict[str, float | tuple[float, float]], str]:
    """Return the terms of nanotron's memory with their percentiles, and lines about their errors in the folds."""
    found = list(nanotron_memory(path))
    rows = np.array([row for row, is_mended in found if is_mended])
    others = np.array([row for row, is_mended in found if not is_mended])
    ratios = np.zeros(len(rows))
    for fold in range(folds):
        out = np.arange(len(rows)) % folds == fold
        ratios[out] = _ratios(rows[out], fitted(rows[~out]))
    low, *_, high = quantiles(ratios, n=10)
    terms = {name: float(f"{value:.3g}") for name, value in zip(TERMS, fitted(rows), strict=True)}
    told = (
        _told("without terms", _ratios(rows, LEAST)),
        _told(f"{folds} folds", ratios),
        _told("older pipeline engine, all terms", _ratios(others, fitted(rows))),
    )
    judged = judged_fits(path, FittedTerms.model_validate(terms))
    return terms | {"memory_spread": (round(float(low), 3), round(float(high), 3))}, "\n".join((*told, judged))


def _ratios(rows: Vector, terms: Vector) -> Vector:
    """Return reserved over predicted bytes."""
    found: Vector = rows[:, 4] / (rows[:, :3] @ terms + rows[:, 3])
    return found


def _told(name: str, ratios: Vector) -> str:
    sizes = np.abs(1 / ratios - 1)
    values = sizes.mean(), np.median(sizes), sizes.max(), np.median(ratios) - 1
    told = "mean {:.1%}, median {:.1%}, worst {:.0%}, bias {:+.1%}".format(*values)
    return f"memory of nanotron, {len(ratios)} runs, {name}: {told}"
