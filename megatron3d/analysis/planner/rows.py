"""Predictions for rows of runs: a JSON object per line in, the same object with the prediction out.

A row has `config` (values by `section.key`), `cluster`, `num_gpus`, and may have `practice` (a name of
`cost_model/practices.py`; ours without one), `measured_s` (seconds of a step) and `group` (for the table of errors).
A row that cannot be predicted gets `refused` with the reason, and the other rows are predicted all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron3d.analysis.cost_model.execution_profile import OURS
from megatron3d.analysis.cost_model.hardware import load_cluster
from megatron3d.analysis.cost_model.practices import practice
from megatron3d.analysis.planner.problem import PlanningProblem
from megatron3d.config.read import read_values
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.model.flops import flops_per_token
from megatron3d.runtime.limits import MAX_RANKS, shorten

Row = dict[str, Any]
# What goes wrong in arithmetic on sizes that pass every rule but are absurd.
ABSURD = (ArithmeticError, AssertionError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
MAX_STEP_S = 1e9


def predict_rows(path: Path) -> Iterator[Row]:
    """Yield each row of a file with its prediction.  Raises UserError if the file cannot be read."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield predict_line(line, number)


def predict_line(line: bytes, number: int) -> Row:
    """Return the row of one line with its prediction, or with `refused`."""
    row: Row = {"line": number}
    try:
        row = _parsed(line)
        return row | predict_row(row)
    except UserError as error:
        return row | {"refused": "; ".join(error.problems)}
    except ABSURD as error:
        return row | {"refused": f"no prediction: {type(error).__name__}: {shorten(str(error))}"}


def _parsed(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not a JSON object: {error}; write one object per line") from error
    if not isinstance(row, dict):
        raise UserError("not a JSON object; write one object per line, as {...}")
    return row


def predict_row(row: Mapping[str, Any]) -> Row:
    """Return the prediction of a row.

    `step_s` with its 10th and 90th percentile in seconds, `tokens_per_s_per_gpu`, `mfu`, `memory_bytes_per_rank` of the
    rank that needs most with the same percentiles, whether that `fits`, and `refused`, which is None.

    Raises UserError if the row has a problem.
    """
    num_gpus = _number(row, "num_gpus", int, 1, MAX_RANKS)
    values, cluster, name = (row.get(key) for key in ("config", "cluster", "practice"))
    if row.get("measured_s") is not None:
        _number(row, "measured_s", (int, float), 1e-9, MAX_STEP_S)
    if not isinstance(values, dict) or not values:
        raise UserError('config: missing; give values by key, as {"model.num_layers": 12, ...}')
    if not isinstance(cluster, str):
        raise UserError("cluster: missing; give a name such as eos, or the path of a YAML file")
    if not isinstance(name, str | None):
        raise UserError("practice: not a name; give one such as nanotron, or leave it out")
    config = read_values(values, "config")
    if config.model.vocab_size is None:
        raise UserError("model.vocab_size: missing; a tokenizer is not read for predictions")
    UserError.collect(check(config, num_gpus, config.model.vocab_size))
    profile = practice(OURS.name if name is None else name, load_cluster(cluster).accelerator)
    problem = PlanningProblem(config, config.model.vocab_size, cluster, num_gpus, profile)
    spec = problem.spec(config)
    seconds, (low, high) = problem.step(spec).step_s, profile.fitted.spread
    tokens_per_s = config.train.global_batch_size * config.model.seq_length / seconds / num_gpus
    memory, libraries, (least, most) = problem.memory(spec), problem.library_bytes(spec), profile.fitted.memory_spread
    memory_bytes = memory.total + libraries
    return {
        "step_s": seconds,
        "step_s_p10": low * seconds,
        "step_s_p90": high * seconds,
        "tokens_per_s_per_gpu": tokens_per_s,
        "mfu": tokens_per_s * flops_per_token(spec.arch) / problem.machine.device.peak,
        "memory_bytes_per_rank": memory_bytes,
        "memory_bytes_p10": memory.total * least + libraries,
        "memory_bytes_p90": memory.total * most + libraries,
        "fits": memory_bytes <= problem.memory_bytes,
        "refused": None,
    }


def _number(row: Mapping[str, Any], key: str, kind: type | tuple[type, ...], low: float, high: float) -> Any:
    value: Any = row.get(key)
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    if is_kind and math.isfinite(value) and low <= value <= high:
        return value
    what = "a whole number" if kind is int else "a number"
    raise UserError(f"{key}={shorten(json.dumps(value))}: not allowed; use {what} from {low:g} to {high:g}")
