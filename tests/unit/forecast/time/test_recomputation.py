"""Fact: torch's checkpointing recomputes a layer but its last linear, Megatron's and ours all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.breakdown import GEMMS
from megatron3d.forecast.time.layer import layer_times
from megatron3d.forecast.time.practices import AXONN, MEGATRON_2021, OURS, PYTORCH_FSDP, ExecutionProfile
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.model.linear_spec import FC2
from megatron3d.model.spec import NO_RECOMPUTE

MODEL = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 2048, "vocab_size": 8192}


@pytest.mark.parametrize(
    ("profile", "stops"),
    [(PYTORCH_FSDP, True), (OURS, False), (MEGATRON_2021, False), (AXONN, False)],
    ids=lambda each: each.name if isinstance(each, ExecutionProfile) else str(each),
)
def test_recomputation_ends_where_the_framework_ends_it(profile: ExecutionProfile, stops: bool) -> None:
    train = {"global_batch_size": 8, "precision": "bf16", "recompute_granularity": "full"}
    config = Config.model_validate({"model": MODEL, "train": train})
    step = simulated_step(RunSpec(config, 1), load_machine("eos", "bf16", 1, profile))
    kept = layer_times(replace(step.local, recompute=NO_RECOMPUTE), step.machine)
    again = layer_times(step.local, step.machine)
    last = step.machine.device.gemm_s(*step.local.matmuls[FC2].multiplied(step.local.mesh))
    added = again.backward.total - kept.backward.total
    assert added == pytest.approx(kept.forward.total - stops * last)
    assert again.backward[GEMMS] > kept.backward[GEMMS] and 0 < last < kept.forward.total / 2
