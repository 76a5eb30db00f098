"""Fact: neutral terms change no memory, others scale it by its parts, and the last stage alone has logits."""

from __future__ import annotations

import pytest

from megatron3d.analysis.cost_model.fitted_terms import NEUTRAL, FittedTerms
from megatron3d.analysis.cost_model.practices import fitted_terms
from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.pipeline_ranks import largest_rank_memory
from megatron3d.analysis.memory_model.rank import rank_memory
from megatron3d.analysis.memory_model.reserved import num_logits, reserved_memory
from megatron3d.analysis.memory_model.step_spec import StepSpec, make_step_spec
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config

MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 8192}


def step_of(tensor: int = 2, pipeline: int = 2) -> StepSpec:
    parallel = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    train = {"global_batch_size": 8, "micro_batch_size": 2, "precision": "bf16"}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    return make_step_spec(RunSpec(config, tensor * pipeline), KERNELS["gpu"])


@pytest.mark.parametrize("rank", [0, 1])
def test_neutral_terms_change_nothing(rank: int) -> None:
    step = step_of().on_pipeline_rank(rank)
    assert reserved_memory(step, NEUTRAL) == rank_memory(step)


def test_each_part_has_its_factor() -> None:
    step = step_of().on_pipeline_rank(1)
    bare, terms = rank_memory(step), FittedTerms(state_memory=2, activation_memory=3, logit_memory=16)
    moving = bare.activations + bare.categories["moment"]
    expected = 2 * (bare.total - moving) + 3 * moving + 16 * num_logits(step)
    assert reserved_memory(step, terms).total == pytest.approx(expected)


@pytest.mark.parametrize("tensor", [1, 2])
def test_logits_of_a_microbatch_are_on_the_last_stage(tensor: int) -> None:
    step = step_of(tensor)
    found = [num_logits(step.on_pipeline_rank(rank)) for rank in range(2)]
    assert found == [0, 2 * 256 * 8192 // tensor]


def test_logits_decide_which_rank_needs_most() -> None:
    step = step_of()
    few, many = largest_rank_memory(step), largest_rank_memory(step, FittedTerms(logit_memory=1e4))
    assert few == rank_memory(step.on_pipeline_rank(0)) and many.total > 1e4 * num_logits(step.on_pipeline_rank(1))


def test_terms_in_use_are_in_bounds() -> None:
    """The planner's lower bounds of memory hold, as no allocator has less than the tensors."""
    terms = fitted_terms()["nanotron"]
    assert 1 < terms.state_memory < 1.3 and 1 < terms.activation_memory < 1.3 and 4 < terms.logit_memory < 24
    assert terms.memory_spread[0] < 1 < terms.memory_spread[1]
