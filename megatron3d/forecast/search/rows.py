"""Predictions for rows of runs: a JSON object per line in, the same object with the prediction out.

A row has `config` (values by `section.key`), `cluster`, `num_gpus`, and may have `practice` (a name of
`forecast/time/practices.py`; ours without one), `measured_s` (seconds of a step) and `group` (for the table of errors).
A row that cannot be predicted gets `refused` with the reason, and the other rows are predicted all the same.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import correlation, mean, median
from typing import Any

from megatron3d.config.read import read_config, read_values
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.forecast.memory.table import align_columns
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.time.hardware import load_cluster
from megatron3d.forecast.time.practices import OURS, practice
from megatron3d.metrics.journal import FILE_NAME, read_journal
from megatron3d.model.linear_spec import flops_per_token
from megatron3d.runtime.arguments import MAX_RANKS, shorten

HEADER = ("", "rows", "mean %", "median %", "worst %", "bias %", "in p10-p90 %", "order", "regret %", "group")
# Parts of a configuration that layouts of the same choice may have different.
_FREE = ("parallel.", "train.micro_batch_size", "train.recompute")


def error_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the errors of rows with `measured_s` by group, and why rows were refused."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("refused") is None and row.get("measured_s") is not None:
            name = row.get("group") or f"{row.get('practice') or 'megatron3d'} on {row['cluster']}"
            groups[str(name)].append(row)
    if len(groups) > 1:
        groups["all"] = [row for some in list(groups.values()) for row in some]
    refused = Counter(str(row["refused"]) for row in rows if row.get("refused") is not None)
    lines = [f"{len(rows) - refused.total()} rows predicted, {refused.total()} refused"]
    if groups:
        lines += align_columns([HEADER, *(_cells(name, some) for name, some in groups.items())])
    return lines + [f"  {number:>7,}  {reason}" for reason, number in refused.most_common(8)]


def _cells(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    errors = [100 * (row["measured_s"] / row["step_s"] - 1) for row in rows]
    sizes, lost = [abs(error) for error in errors], regrets(rows)
    inside = mean(row["step_s_p10"] <= row["measured_s"] <= row["step_s_p90"] for row in rows)
    order = rank_correlation([row["measured_s"] for row in rows], [row["step_s"] for row in rows])
    numbers = [f"{number:.1f}" for number in (mean(sizes), median(sizes), max(sizes), 0.0, 100 * inside)]
    numbers[3] = f"{median(errors):+.1f}"
    told = f"{mean(lost):.1f}, worst {max(lost):.1f}" if lost else "-"
    return ("", str(len(rows)), *numbers, "-" if order is None else f"{order:.3f}", told, name)


def regrets(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return by how many percent the predicted best layout is slower than the best, of choices of three or more.

    Rows of one choice have the same model, batch, cluster, practice and number of GPUs.
    """
    choices: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        kept = {key: value for key, value in row["config"].items() if not key.startswith(_FREE)}
        key = json.dumps([kept, row["cluster"], row["num_gpus"], row.get("practice")], sort_keys=True)
        choices[key].append((row["step_s"], row["measured_s"]))
    several = [pairs for pairs in choices.values() if len(pairs) >= 3]
    return [100 * (min(pairs)[1] / min(measured for _, measured in pairs) - 1) for pairs in several]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's correlation of two sequences; None where it is not defined."""
    if len({*first}) == 1 or len({*second}) == 1:
        return None
    return correlation(_places(first), _places(second))


def _places(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; equal values share the mean of their places."""
    order = sorted(values)
    counts = Counter(values)
    firsts = {value: order.index(value) for value in counts}
    return [firsts[value] + (counts[value] - 1) / 2 for value in values]


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
