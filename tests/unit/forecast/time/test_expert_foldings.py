"""Fact: published runs of mixtures of experts are predicted within stated bounds, which docs/validation.md repeats."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

from megatron3d.config.schema import Config
from megatron3d.forecast.search.problem import PlanningProblem, read_fixed
from megatron3d.forecast.search.search import search
from megatron3d.forecast.time.hardware import load_cluster
from megatron3d.forecast.time.practices import practice

HERE = Path(__file__).parent
DATA = json.loads((HERE / "data" / "expert_foldings.json").read_text(encoding="utf-8"))
DOCS = (HERE.parents[3] / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()
# What Megatron-Core offers, and does in these runs: no zero-bubble schedule, and whole experts on each rank.
FIXED = ("zero_stage=1", "pipeline_schedule=interleaved", "expert_tensor_parallel_size=1")
LLAMA = {"family": "llama", "seq_length": 4096}


class Predicted(NamedTuple):
    """A published and a predicted MFU in percent, and the layout that was predicted."""

    row: dict[str, Any]
    mfu: float
    layout: str

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.mfu / self.row["published"] - 1


@cache
def predicted(places: tuple[int, ...]) -> tuple[Predicted, ...]:
    """Predict rows with the layouts that the planner finds fastest."""
    found = []
    for row in (DATA["rows"][place] for place in places):
        model = LLAMA | DATA["models"][row["model"]]
        config = Config.model_validate({"model": model, "train": {"global_batch_size": 1024, "precision": "bf16"}})
        profile = practice("Megatron-Core 0.8", load_cluster("eos").accelerator)
        problem = PlanningProblem(config, model["vocab_size"], "eos", row["gpus"], profile, read_fixed(FIXED))
        (best,) = search(problem, 1, ["1d"]).plans
        found.append(Predicted(row, 100 * problem.mfu(best), str(best.layout)))
    return tuple(found)


# The smallest and the largest run of each model, since a search takes 4 s; this file, as a program, prints all.
ENDS = (0, 3, 4, 8)


@pytest.mark.slow
def test_published_runs_with_experts_are_predicted() -> None:
    errors = [each.error for each in predicted(ENDS)]
    assert mean(map(abs, errors)) <= 0.08 and max(map(abs, errors)) <= 0.16, predicted(ENDS)


@pytest.mark.slow
def test_the_page_shows_the_predictions() -> None:
    for each in predicted(ENDS):
        start = f"| {each.row['model']} | {each.row['gpus']} | "
        (line,) = (line for line in DOCS if line.startswith(start))
        cells = re.split(r"\s*\|\s*", line.removeprefix(start))
        assert float(cells[0]) == each.row["published"]
        assert float(cells[1]) == pytest.approx(each.mfu, rel=0.01)
        assert float(cells[2].removesuffix(" %")) == pytest.approx(100 * each.error, abs=0.6)
        assert cells[3] == each.layout.partition(", ZeRO")[0]


if __name__ == "__main__":
    for each in predicted(tuple(range(len(DATA["rows"])))):
        known = each.row["model"], each.row["gpus"], each.row["published"]
        cells = *known, f"{each.mfu:.1f}", f"{100 * each.error:+.1f} %"
        print("|", " | ".join(map(str, cells)), "|", each.layout.partition(", ZeRO")[0], "|")
