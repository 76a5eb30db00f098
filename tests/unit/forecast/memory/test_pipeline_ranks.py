"""Fact: the pipeline rank that needs most memory is found wherever it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import (
    MemoryOfRank,
    candidates,
    fitting_rank_memory,
    largest_rank_memory,
    rank_memory,
)
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.memory.sweep import residual_shards
from megatron3d.model.local_sizes import KERNELS


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_uneven_pipelines(schedule: str) -> None:
    """Neither end needs most where the ranks with two layers are in the middle."""
    model = {"num_layers": 14, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 256}
    parallel = {"pipeline_model_parallel_size": 12, "pipeline_schedule": schedule}
    parallel["pipeline_model_parallel_layout"] = [1] * 4 + [2] * 2 + [1] * 6
    config = Config.model_validate({"model": model, "parallel": parallel, "train": {"global_batch_size": 24}})
    step = make_step_spec(RunSpec(config, 12), KERNELS["gpu"])
    totals = [rank_memory(step.on_pipeline_rank(coord)).total for coord in range(12)]
    assert largest_rank_memory(step).total == max(totals) > max(totals[0], totals[-1])
    assert len(candidates(step)) < 12
    assert fitting_rank_memory(step, max(totals)) == largest_rank_memory(step)
    assert fitting_rank_memory(step, max(totals) - 1) is None


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_the_lower_bound_leaves_out_moments_and_residual_shards(schedule: str, zero_stage: int, precision: str) -> None:
    """It is at most the memory that is predicted, and misses at most the largest moment and residual shards."""
    model = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 256}
    parallel = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule, "zero_stage": zero_stage}
    train = {"global_batch_size": 16, "precision": precision}
    step = make_step_spec(
        RunSpec(Config.model_validate({"model": model, "parallel": parallel, "train": train}), 8), KERNELS["gpu"]
    )
    for coord in range(4):
        here = step.on_pipeline_rank(coord)
        memory, most_shards = rank_memory(here), max(residual_shards(here))
        without_moments = replace(memory, transient_peaks={}).total
        least = without_moments - most_shards * here.local.residual
        assert least <= MemoryOfRank(here).least_bytes <= memory.total
