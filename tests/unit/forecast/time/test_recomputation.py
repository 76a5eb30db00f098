"""Fact: torch's checkpointing recomputes a layer but its last linear, Megatron's and ours all of it.

A recomputed forward moves what the forward moves, but for weights that are kept, and waits for each weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.time.breakdown import GEMMS
from megatron3d.forecast.time.layer import layer_times
from megatron3d.forecast.time.practices import AXONN, MEGATRON_2021, OURS, PYTORCH_FSDP, ExecutionProfile
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.forecast.time.tasks import AGAIN, FORWARD, WEIGHT, tasks_of
from megatron3d.model.linear_spec import FC2
from megatron3d.model.operations import layer_operations
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


@pytest.mark.parametrize("keeps", [False, True], ids=["gathered again", "kept"])
def test_a_recomputed_forward_gathers_each_weight_once_and_waits_for_it(keeps: bool) -> None:
    parallel = {
        "tensor_model_parallel_size": 8,
        "tensor_parallel_mode": "3d",
        "tp_comm_overlap_weight_gather": True,
        "tp_keep_gathered_weights": keeps,
    }
    train = {"global_batch_size": 8, "micro_batch_size": 8, "precision": "bf16", "recompute_granularity": "full"}
    config = Config.model_validate({"model": MODEL, "train": train, "parallel": parallel})
    local = simulated_step(RunSpec(config, 8), load_machine("eos", "bf16", 8)).local
    tasks = tasks_of(layer_operations(local), local, is_recomputed=True)
    first, again = ([task for task in tasks if task.calls and task.phases == phase] for phase in (FORWARD, AGAIN))
    calls = [[(task.operation, call) for task in some for call in task.calls] for some in (first, again)]
    weights = [(task.operation, call) for task in first if task.what == WEIGHT for call in task.calls]
    assert len(weights) >= 4
    assert sorted(calls[1] + keeps * weights) == sorted(calls[0])
    assert not any(task.behind for task in again if task.what == WEIGHT)
