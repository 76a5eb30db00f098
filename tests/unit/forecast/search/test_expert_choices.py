"""Fact: the planner distributes experts over ranks where that is faster, and its bounds stay below the step times."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config.read import read_config
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.forecast.search.bounds import in_order, layout_groups
from megatron3d.forecast.search.options import ExpertChoice, expert_choices
from megatron3d.forecast.search.problem import PlanningProblem, read_fixed
from megatron3d.forecast.search.search import search
from megatron3d.model.spec import layer_counts
from tools import plan as tool

MIXTRAL = Path("configs/models/mixtral-8x7b.yaml")
MODEL = {
    "family": "llama",
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024,
}
TRAIN = {"global_batch_size": 16, "precision": "bf16"}
PROBLEM = PlanningProblem(Config.model_validate({"model": MODEL, "train": TRAIN}), 8192, "perlmutter", 8)


def test_mixtral_on_64_gpus_has_expert_ranks() -> None:
    here = PlanningProblem(read_config(MIXTRAL, []).config, 32000, "eos", 64, fixed=read_fixed(["zero_stage=1"]))
    alone = replace(here, fixed=read_fixed(["zero_stage=1", "expert_model_parallel_size=1"]))
    best, together = (search(each, 1, ["1d"]).plans[0] for each in (here, alone))
    assert best.layout.experts.size > 1 and together.layout.experts.size == 1
    assert best.step.step_s < 0.99 * together.step.step_s
    assert f"EP {best.layout.experts.size}," in str(best.layout)
    assert check(best.config, 64, 32000) == []
    assert tool.layout_of(best.config).experts == best.layout.experts


def test_bounds_are_lower_than_the_steps_of_every_folding() -> None:
    bounds = list(in_order(list(layout_groups(PROBLEM, Counter()))))
    assert {bound.layout.experts for bound in bounds} >= {ExpertChoice(8), ExpertChoice(2, 4), ExpertChoice(1, 2)}
    tried = 0
    for bound in random.Random(0).sample(bounds, 120):
        config = bound.layout.apply_to(PROBLEM.config)
        if not check(config, 8, 8192):
            seconds = PROBLEM.step(PROBLEM.spec(config)).step_s
            assert bound.seconds <= 1.02 * seconds, bound.layout
            tried += bound.layout.experts.size > 1
    assert tried > 20


def test_bounds_count_the_gradients_of_experts() -> None:
    """Where each microbatch reduces them, that may be most of a step, and such layouts are not looked at first."""
    train = {**TRAIN, "global_batch_size": 256}
    here = replace(
        PROBLEM, config=Config.model_validate({"model": MODEL, "train": train}), fixed=read_fixed(["zero_stage=3"])
    )
    bounds = [
        bound for bound in in_order(list(layout_groups(here, Counter(), ["1d"]))) if bound.layout.experts.size == 2
    ]
    for bound in random.Random(0).sample(bounds, 40):
        config = bound.layout.apply_to(here.config)
        if not check(config, 8, 8192):
            seconds = here.step(here.spec(config)).step_s
            assert 0.6 * seconds < bound.seconds <= seconds, bound.layout


def test_fixed_sizes_of_experts_are_kept() -> None:
    fixed = read_fixed(["expert_model_parallel_size=4", "expert_tensor_parallel_size=2"])
    (best,) = search(replace(PROBLEM, fixed=fixed), 1, ["1d"]).plans
    assert best.layout.experts == ExpertChoice(4, 2)
    parallel = best.config.parallel
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (4, 2)
    with pytest.raises(UserError, match="size=3: no layout that may fit has it; use 1, 2, 4 or 8"):
        search(replace(PROBLEM, fixed=read_fixed(["expert_model_parallel_size=3"])), 1, ["1d"])


def test_experts_are_split_over_the_tensor_ranks_or_not_at_all() -> None:
    arch = PROBLEM.spec(PROBLEM.config).arch
    assert [str(each) for each in expert_choices(arch, 2, 4)] == ["EP 1", "EP 2", "EP 4", "EP 1 ETP 2", "EP 2 ETP 2"]
    dense = replace(arch, experts=None)
    assert [*expert_choices(dense, 2, 4)] == [ExpertChoice()]


def test_layers_of_a_kind_are_counted_together() -> None:
    """DeepSeek-V3 lists 61 layers of two kinds; each kind is predicted once, not each layer."""
    model = {**MODEL, "num_layers": 8, "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]}
    arch = PROBLEM.spec(Config.model_validate({"model": model, "train": TRAIN})).arch
    assert layer_counts(arch, range(8)) == {0: 2, 2: 6}
    assert layer_counts(arch, [1, 7, 5]) == {0: 1, 2: 2}
