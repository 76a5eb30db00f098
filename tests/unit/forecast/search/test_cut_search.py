"""Fact: a search that ends early says of how many layouts it is sure, and a thorough one is sure of all."""

from __future__ import annotations

import pytest

from megatron3d.config.schema import Config
from megatron3d.forecast.search import search as searching
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.search.report import result_table
from megatron3d.forecast.search.search import search

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
