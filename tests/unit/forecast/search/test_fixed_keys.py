"""Fact: the planner keeps fixed keys and the memory margin, and tries every even number of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.forecast.search.options import LayoutChoice, TensorChoice, pipelines
from megatron3d.forecast.search.problem import VALUES, PlanningProblem, read_fixed
from megatron3d.forecast.search.search import search

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 8192}
TRAIN = {"global_batch_size": 8, "precision": "bf16"}
PROBLEM = PlanningProblem(Config.model_validate({"model": MODEL, "train": TRAIN}), 8192, "perlmutter", 4)


def test_every_plan_has_the_fixed_values() -> None:
    fixed = read_fixed(["tensor_model_parallel_size=2", "train.recompute_granularity=full"])
    plans = search(replace(PROBLEM, fixed=fixed), 3, ["1d"]).plans
    assert len(plans) == 3
    assert all(plan.layout.tensor.size == 2 and plan.layout.recompute == "full" for plan in plans)
    assert plans[0].step.step_s > search(PROBLEM, 1, ["1d"]).plans[0].step.step_s


def test_each_key_is_what_the_layout_writes() -> None:
    layout = LayoutChoice(TensorChoice("1d", "sequence_parallel", (2,)), 2, "interleaved", 2, 1, 2, "selective")
    config = layout.apply_to(PROBLEM.config)
    for key, value in VALUES.items():
        section, name = key.split(".")
        assert value(layout) == getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["tensor_parallel_size=4"], "use tensor_model_parallel_size=VALUE"),
        (["zero_stage"], "use zero_stage=VALUE"),
        (["zero_stage={"], "the value is not YAML"),
        (["zero_stage=9"], r"zero_stage=9 \(--fix\): not allowed; use 0, 1, 2 or 3"),
        (["tensor_model_parallel_size=x"], "text is not allowed; use a whole number"),
        (["zero_stage=1", "parallel.zero_stage=2"], "given twice"),
    ],
)
def test_unknown_keys_and_values_are_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_fixed(texts)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["tensor_model_parallel_size=3"], "size=3: no layout that may fit has it; use 1, 2 or 4"),
        (
            ["tensor_model_parallel_size=4", "pipeline_model_parallel_size=2"],
            "pipeline_model_parallel_size=2: no layout that may fit has it next to the other fixed values; use 1",
        ),
        (["tensor_model_parallel_size=3", "pipeline_model_parallel_size=3"], "other values of two keys or more"),
    ],
)
def test_values_that_no_layout_has_are_refused_with_those_that_one_has(texts: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        search(replace(PROBLEM, fixed=read_fixed(texts)), 1, ["1d"])


def test_the_margin_is_left_free() -> None:
    whole = replace(PROBLEM, spare=0.0).memory_bytes
    assert PROBLEM.memory_bytes == pytest.approx(0.92 * whole)


def test_numbers_of_stages_are_powers_of_two_and_even_splits() -> None:
    found = {v for ranks, name, v in pipelines(8, 96) if (ranks, name) == (8, "interleaved")}
    assert found == {2, 3, 4, 6, 8, 12}
    assert {v for ranks, name, v in pipelines(8, 40) if (ranks, name) == (8, "interleaved")} == {2, 4, 5}
