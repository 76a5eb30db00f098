"""Fact: a search that ends early says of how many layouts it is sure, and a thorough one is sure of all."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.forecast.search import search as searching
from megatron3d.forecast.search.problem import PlanningProblem, read_fixed
from megatron3d.forecast.search.report import result_table
from megatron3d.forecast.search.search import least_state_bytes, search
from megatron3d.forecast.time.breakdown import TimePrediction
from megatron3d.model.linear_spec import num_parameters
from tools import plan as tool

MODEL = {"num_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 8192}
TRAIN = {"global_batch_size": 8, "precision": "bf16"}
PROBLEM = PlanningProblem(Config.model_validate({"model": MODEL, "train": TRAIN}), 8192, "perlmutter", 4)


def test_a_cut_search_is_sure_of_plans_below_the_next_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(PROBLEM, 4, ["1d"], is_thorough=True)
    assert whole.num_sure == len(whole.plans) == 4
    assert not [line for line in result_table(whole, PROBLEM) if "search was cut" in line]
    monkeypatch.setattr(searching, "MOST", 20)
    cut = search(PROBLEM, 4, ["1d"])
    assert 0 < cut.num_sure < len(cut.plans)
    assert cut.plans[: cut.num_sure] == whole.plans[: cut.num_sure]
    (told,) = [line for line in result_table(cut, PROBLEM) if "search was cut" in line]
    assert told.endswith(f"may be faster than all but the first {cut.num_sure}; see --thorough")


def test_a_search_out_of_time_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are missing may be those of a faster layout, so that it is sure of none."""
    monkeypatch.setattr(searching, "BOUNDS_S", 0.0)
    monkeypatch.setattr(searching, "SEARCH_S", 0.0)
    cut = search(PROBLEM, 4, ["1d"])
    assert len(cut.plans) == 1 and cut.num_sure == 0
    assert [line for line in result_table(cut, PROBLEM) if "search was cut" in line]
    assert search(PROBLEM, 4, ["1d"], is_thorough=True).num_sure == 4


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "PROGRESS_S", 0.0)
    told: list[str] = []
    best = search(PROBLEM, 1, ["1d"], tell=told.append).plans[0]
    assert "layouts bounded; best so far: none" in told[0]
    assert f"best so far: {best.step.step_s:.3f} s with {best.layout}" in told[-1]


def test_ctrl_c_prints_the_best_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "model.yaml", tmp_path / "layout.yaml"
    path.write_text(json.dumps({"model": MODEL, "train": TRAIN}), encoding="utf-8")
    real, calls = PlanningProblem.step, iter(range(4))

    def stopped(self: PlanningProblem, spec: RunSpec) -> TimePrediction:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(self, spec)

    monkeypatch.setattr(PlanningProblem, "step", stopped)
    words = ["--config", str(path), "--cluster", "perlmutter", "--world-size", "4", "--modes", "1d"]
    assert tool.main([*words, "--output", str(out)]) == 130
    told = capsys.readouterr()
    assert "incomplete, the search was stopped" in told.out and "MFU" in told.out and not out.exists()
    assert "stopped; the table is of the layouts that were predicted so far" in told.err
    assert tool.main(words) == 130 and "MFU" not in capsys.readouterr().out  # nothing was predicted


def test_a_model_that_fits_nowhere_says_what_its_state_needs() -> None:
    """16 bytes of each of the parameters, of 40 GB: no layout on fewer ranks has memory for them."""
    large = {**MODEL, "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}
    here = PlanningProblem(Config.model_validate({"model": large, "train": TRAIN}), 8192, "perlmutter", 4)
    state = 16 * num_parameters(here.spec(here.config).arch)
    assert least_state_bytes(here) == state
    least = math.ceil(state / here.memory_bytes)
    with pytest.raises(UserError, match=f" GiB, need {least} GPUs or more; on (\\d+) GPUs fits 1d") as refused:
        search(here, 1, ["1d"])
    (enough,) = map(int, re.findall(r"or more; on (\d+) GPUs fits", str(refused.value)))
    assert least <= enough < 4 * least
    fixed = read_fixed(["zero_stage=3", "micro_batch_size=1", "recompute_granularity=full"])
    assert search(replace(here, num_ranks=enough, fixed=fixed), 1, ["1d"]).plans
