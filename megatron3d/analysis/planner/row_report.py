"""Errors of predicted rows by group: positive ones are predictions that are too fast."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from megatron3d.analysis.memory_model.table import align_columns

HEADER = ("", "rows", "mean %", "median %", "worst %", "bias %", "in p10-p90 %", "order", "regret %", "group")
# Parts of a configuration that layouts of the same choice may have different.
_FREE = ("parallel.", "train.micro_batch_size", "train.recompute")


def error_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the errors of rows with `measured_s` by group, and why rows were refused."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("refused") is None and row.get("measured_s") is not None:
            groups[group_of(row)].append(row)
    if len(groups) > 1:
        groups["all"] = [row for some in list(groups.values()) for row in some]
    refused = Counter(str(row["refused"]) for row in rows if row.get("refused") is not None)
    lines = [f"{len(rows) - refused.total()} rows predicted, {refused.total()} refused"]
    if groups:
        lines += align_columns([HEADER, *(_cells(name, some) for name, some in groups.items())])
    return lines + [f"  {number:>7,}  {reason}" for reason, number in refused.most_common(8)]


def group_of(row: Mapping[str, Any]) -> str:
    """Return a row's `group`, or else its practice and cluster."""
    return str(row.get("group") or f"{row.get('practice') or 'megatron3d'} on {row['cluster']}")


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
    places = [_places(values) for values in (first, second)]
    means = [mean(values) for values in places]
    spans = [sum((place - middle) ** 2 for place in each) for each, middle in zip(places, means, strict=True)]
    if min(spans) == 0:
        return None
    together = sum((a - means[0]) * (b - means[1]) for a, b in zip(*places, strict=True))
    return float(together / (spans[0] * spans[1]) ** 0.5)


def _places(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; equal values share the mean of their places."""
    order = sorted(values)
    counts = Counter(values)
    firsts = {value: order.index(value) for value in counts}
    return [firsts[value] + (counts[value] - 1) / 2 for value in values]
