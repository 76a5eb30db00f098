"""Fact: the pipeline rank that needs most memory is found wherever it is."""

from __future__ import annotations

import pytest

from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.pipeline_ranks import candidates, fitting_rank_memory, largest_rank_memory
from megatron3d.analysis.memory_model.rank import rank_memory
from megatron3d.analysis.memory_model.step_spec import make_step_spec
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config


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
