"""Fact: experts that multiply in fp8 compute the numbers of one process in every layout, in float64.

Blocks are smaller than a recipe's, so that a small model has several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.traffic import step_flops, step_traffic
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.model.local_sizes import KERNELS
from megatron3d.parallel.modes.mode import ALLGATHER, ALLTOALL
from megatron3d.pipeline.lower import lower
from megatron3d.verify.dry_run import run_rank, step_totals, with_few_microbatches
from megatron3d.verify.layouts import StepTrace, differences
from tests.support.equality import MODELS, TOLERANCE, VOCAB_SIZE, configure, run_trace
from tests.support.fp8_rows import small_recipes
from tests.support.operation_record import problems
from tests.support.turn_ranks import run_turns

BLOCK = 8
KERNEL = replace(KERNELS["cpu"], num_received=0)  # as the process group of a dry run
SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "num_layers": 2,
}
MODEL = {**MODELS["experts, shared experts, losses of routers"], **SIZES}
SEQUENCES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Keys of the layout, and the number of ranks.
LAYOUTS: Mapping[str, tuple[dict[str, Any], int]] = {
    "data, alltoall": ({"expert_model_parallel_size": 2, "moe_token_dispatcher_type": ALLTOALL, "zero_stage": 3}, 2),
    "data, allgather": ({"expert_model_parallel_size": 2, "moe_token_dispatcher_type": ALLGATHER, "zero_stage": 1}, 2),
    "split": ({"expert_tensor_parallel_size": 2, "zero_stage": 1}, 2),
    "split and folded": (
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, **SEQUENCES, "zero_stage": 3},
        8,
    ),
    "pipeline": (
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        4,
    ),
    "pieces": (
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "zero_stage": 2,
            "moe_token_dispatcher_type": ALLTOALL,
        },
        8,
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in small_recipes(BLOCK).items():
        monkeypatch.setitem(RECIPES, name, recipe)


def fp8_config(model: Mapping[str, Any], recipe: str, parallel: Mapping[str, Any], **train: Any) -> Config:
    return configure(model, parallel, fp8="hybrid", fp8_recipe=recipe, global_batch_size=8, **train)


def micro_batch(name: str) -> int:
    """Return the sequences of a microbatch, of which eight data ranks have one each."""
    parallel, num_ranks = LAYOUTS[name]
    return 1 if num_ranks == 8 and "sequence_parallel" not in parallel else 2


@cache
def one_process(recipe: str, micro: int) -> StepTrace:
    """Return the trace of one process with the same microbatches, whose tensors are quantized whole by some recipes."""
    found = run_trace(0, 1, fp8_config(MODEL, recipe, {}, micro_batch_size=micro))
    assert found is not None, "one process is rank 0"
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_fp8_equal_one_process(name: str, recipe: str) -> None:
    parallel, num_ranks = LAYOUTS[name]
    micro = micro_batch(name)
    config = fp8_config(MODEL, recipe, parallel, micro_batch_size=micro)
    assert check(config, num_ranks, VOCAB_SIZE) == []
    got = run_turns(run_trace, num_ranks, config, 2)[0]
    assert list(differences(one_process(recipe, micro), got, TOLERANCE)) == []


def last_rank(name: str, recipe: str) -> RunSpec:
    parallel, num_ranks = LAYOUTS[name]
    config = fp8_config(MODEL, recipe, parallel, micro_batch_size=micro_batch(name))
    return RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)


# Every second recipe of each layout.
PREDICTED = [(name, recipe) for a, name in enumerate(LAYOUTS) for b, recipe in enumerate(RECIPES) if (a + b) % 2 == 0]


@pytest.mark.parametrize(("name", "recipe"), PREDICTED)
def test_operations_are_those_of_the_step(name: str, recipe: str) -> None:
    """Tokens that are sent as bytes, rows that are kept in fp8, and largest values of experts that ranks split."""
    assert problems(last_rank(name, recipe)) == []


@pytest.mark.parametrize(("name", "recipe"), PREDICTED)
def test_a_dry_run_has_the_predicted_traffic_and_peak(name: str, recipe: str) -> None:
    spec = last_rank(name, recipe)
    run, step = run_rank(with_few_microbatches(spec)), make_step_spec(spec, KERNEL)
    dry, expected = step_totals(run, lower(spec.schedule)[run.coord]), step_traffic(step)
    assert dry.calls == expected.calls and dry.sent == pytest.approx(expected.sent)
    assert dry.flops == step_flops(step)
    assert abs(rank_memory(step).total / dry.peak - 1) < 0.02
