"""Fact: neutral terms change no memory, others add what they say, and the last stage alone has logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import gathered_inputs, largest_rank_memory, num_logits, rank_memory, reserved_for
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.time.practices import OURS, ExecutionProfile, FittedTerms, fitted_terms, practice
from megatron3d.model.local_sizes import KERNELS

MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 8192}


def step_of(tensor: int = 2, pipeline: int = 2, data: int = 1, **parallel: object) -> StepSpec:
    parallel |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    train = {"global_batch_size": 16 * data, "micro_batch_size": 2, "precision": "bf16"}
    config = Config.model_validate({"model": MODEL, "parallel": parallel, "train": train})
    return make_step_spec(RunSpec(config, tensor * pipeline * data), KERNELS["gpu"])


def with_terms(**terms: float) -> ExecutionProfile:
    return replace(OURS, fitted=FittedTerms(**terms))


@pytest.mark.parametrize("rank", [0, 1])
def test_neutral_terms_change_nothing(rank: int) -> None:
    step = step_of().on_pipeline_rank(rank)
    assert reserved_for(rank_memory(step), step, OURS) == rank_memory(step)


def test_each_part_has_its_factor() -> None:
    step = step_of().on_pipeline_rank(1)
    bare = rank_memory(step)
    moving = bare.activations + bare.categories["moment"]
    expected = bare.total + 2 * moving + 16 * num_logits(step)
    found = reserved_for(bare, step, with_terms(activation_memory=3, logit_memory=16))
    assert found.total == pytest.approx(expected)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_buckets_hold_gradients_again_where_ranks_reduce_them(zero_stage: int) -> None:
    profile = replace(OURS, bucket_itemsize=2)
    for data in (1, 2):
        step = step_of(pipeline=1, data=data, zero_stage=zero_stage)
        bare = rank_memory(step)
        added = reserved_for(rank_memory(step), step, profile).gradients - bare.gradients
        assert added == (bare.weights if data == 2 else 0)  # of bf16, both


@pytest.mark.parametrize("tensor", [1, 2])
def test_logits_of_a_microbatch_are_on_the_last_stage(tensor: int) -> None:
    step = step_of(tensor)
    found = [num_logits(step.on_pipeline_rank(rank)) for rank in range(2)]
    assert found == [0, 2 * 256 * 8192 // tensor]


def test_gathered_inputs_are_of_microbatches_that_a_host_launches_ahead() -> None:
    """Two linears of a layer gather their input: one microbatch of 4 layers, or all but two in flight of 1 layer."""
    one = 2 * (2 * 256) * 256 * 2
    assert gathered_inputs(step_of(pipeline=1, sequence_parallel=True)) == 4 * one
    deep = step_of(pipeline=4, sequence_parallel=True)
    layers = [len(deep.on_pipeline_rank(rank).stages[0].layers) for rank in range(4)]
    ahead = [gathered_inputs(deep.on_pipeline_rank(rank)) for rank in range(4)]
    assert ahead == [2 * layers[0] * one, layers[1] * one, 0, 0] and layers[1] > 0
    assert gathered_inputs(step_of(tensor=1, pipeline=1)) == 0  # nothing is gathered
    step = step_of(pipeline=1, sequence_parallel=True)
    added = reserved_for(rank_memory(step), step, with_terms(gathered_memory=0.5)).total - rank_memory(step).total
    assert added == 2 * one


def test_logits_decide_which_rank_needs_most() -> None:
    step = step_of()
    few, many = largest_rank_memory(step), largest_rank_memory(step, with_terms(logit_memory=1e4))
    assert few == rank_memory(step.on_pipeline_rank(0)) and many.total > 1e4 * num_logits(step.on_pipeline_rank(1))


def test_terms_in_use_are_in_bounds() -> None:
    """The planner's lower bounds of memory hold, as no allocator has less than the tensors."""
    terms = fitted_terms()["nanotron"]
    assert 1 < terms.activation_memory < 1.3 and 4 < terms.logit_memory < 24 and 0.5 < terms.gathered_memory < 1
    assert terms.memory_spread[0] < 1 < terms.memory_spread[1]
    assert practice("nanotron").bucket_itemsize == 2


# Of the runs behind the Ultrascale playbook: layers, hidden size, heads, ffn; ranks (data, tensor, pipeline), size of
# microbatches and their number, ZeRO stage, and the GiB that were reserved; None: the run ended out of memory.
Run = tuple[tuple[int, int, int, int], tuple[int, int, int], int, int, int, float | None]
LARGE, MEDIUM, SMALL = (80, 8192, 64, 28672), (28, 3072, 32, 8192), (16, 2048, 32, 8192)
RUNS: tuple[Run, ...] = (
    (LARGE, (16, 8, 2), 2, 8, 1, 64.31),
    (LARGE, (32, 8, 2), 2, 4, 1, 66.31),
    (LARGE, (32, 16, 1), 2, 4, 1, 53.46),
    (LARGE, (1, 32, 4), 8, 32, 0, 45.33),
    (MEDIUM, (4, 1, 16), 4, 16, 1, 70.75),
    (MEDIUM, (2, 4, 2), 16, 8, 1, None),
    (SMALL, (16, 1, 2), 8, 2, 1, None),
    (LARGE, (16, 4, 4), 1, 16, 1, None),
)


@pytest.mark.parametrize("run", RUNS)
def test_nanotron_runs_that_finished_fit(run: Run) -> None:
    """What an allocator holds beyond its tensors is predicted, and is not left free once more; and memory of gathered
    inputs that it may use again is no reason why a run does not fit."""
    (layers, hidden, heads, ffn), (data, tensor, pipeline), micro, number, zero_stage, reserved = run
    model: dict[str, object] = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
    }
    model |= {"ffn_hidden_size": ffn, "seq_length": 4096, "vocab_size": 131072, "tie_embeddings": hidden < 4096}
    parallel: dict[str, object] = {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "zero_stage": zero_stage,
    }
    train: dict[str, object] = {
        "micro_batch_size": micro,
        "global_batch_size": micro * number * data,
        "precision": "bf16",
    }
    parallel["pipeline_model_parallel_size"] = pipeline
    sections = {"model": model, "parallel": parallel, "train": train | {"bucket_mb": 25.0, "compile": False}}
    config = Config.model_validate(sections)
    here = PlanningProblem(config, 131072, "eos", data * tensor * pipeline, practice("nanotron"))
    spec = here.spec(config)
    needed = here.memory(spec).total + here.library_bytes(spec)
    assert (needed <= here.memory_bytes) is (reserved is not None)
    assert (here.fitting_memory(spec) is None) is (reserved is None)


MIXTRAL: dict[str, object] = {
    "family": "llama",
    "num_layers": 56,
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "num_query_groups": 8,
}
MIXTRAL |= {"ffn_hidden_size": 16384, "seq_length": 4096, "vocab_size": 32000, "moe_ffn_hidden_size": 16384}
MIXTRAL |= {"num_moe_experts": 8, "moe_router_topk": 2}


@pytest.mark.parametrize("name", ["megatron3d", "Megatron-Core 0.8"])
def test_the_published_layout_of_mixtral_8x22b_fits(name: str) -> None:
    """It ran on 128 GPUs of 80 GB (Liu et al. 2025, arXiv:2504.14960): TP 2, EP 8, PP 8 with 7 stages a rank."""
    parallel: dict[str, object] = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 8,
    }
    parallel |= {"pipeline_model_parallel_size": 8, "pipeline_schedule": "interleaved", "zero_stage": 1}
    parallel["virtual_pipeline_model_parallel_size"] = 7
    train: dict[str, object] = {"global_batch_size": 256, "precision": "bf16"}
    config = Config.model_validate({"model": MIXTRAL, "parallel": parallel, "train": train})
    here = PlanningProblem(config, 32000, "eos", 128, practice(name))
    assert here.fitting_memory(here.spec(config)) is not None


def test_gathered_inputs_take_what_is_left() -> None:
    step = step_of(pipeline=1, sequence_parallel=True)
    bare, terms = rank_memory(step), with_terms(gathered_memory=2)
    added = 2 * gathered_inputs(step)
    for most, expected in ((bare.total - 1, 0), (bare.total + 5, 5), (bare.total + 2 * added, added)):
        assert reserved_for(bare, step, terms, most).total - bare.total == expected
