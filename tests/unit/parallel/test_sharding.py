"""Fact: buckets of gradients are as large as configured; by default they grow with the data-parallel ranks on GPUs.

The bug that this finds: a default that does not depend on the device, so that the numbers of runs on CPUs change, or
that does not grow with the ranks, so that a large job waits for the latency of each of its reductions.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.step import load_machine, simulated_step
from megatron3d.model.local_sizes import KERNELS
from megatron3d.parallel.layout import bucket_bytes
from megatron3d.parallel.matmul_plan import Traffic

MIB = 2**20


@pytest.mark.parametrize(
    ("configured", "data_ranks", "on_gpu", "expected"),
    [
        (None, 1, False, 25),
        (None, 4096, False, 25),
        (None, 1, True, 160),
        (None, 40, True, 160),
        (None, 128, True, 512),
        (7.5, 128, True, 7.5),
        (7.5, 128, False, 7.5),
    ],
)
def test_size_by_hand(configured: float | None, data_ranks: int, on_gpu: bool, expected: float) -> None:
    assert bucket_bytes(configured, data_ranks, on_gpu) == expected * MIB


def spec(num_ranks: int, **parallel: Any) -> RunSpec:
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    train = {"micro_batch_size": 1, "global_batch_size": num_ranks, "precision": "bf16"}
    return RunSpec(Config.model_validate({"model": model, "parallel": parallel, "train": train}), num_ranks, 500)


def test_replicas_count_as_data_parallel_ranks() -> None:
    run = spec(256, tensor_model_parallel_size=2, num_distributed_optimizer_instances=4, zero_stage=1)
    assert run.bucket_bytes(on_gpu=True) == 4 * 128 * MIB


def test_memory_and_time_are_predicted_with_the_size_of_the_device() -> None:
    run = spec(256)
    assert make_step_spec(run, KERNELS["gpu"]).bucket_bytes == 1024 * MIB
    assert make_step_spec(run).bucket_bytes == 25 * MIB
    assert simulated_step(run, load_machine("eos", "bf16", 256)).bucket_bytes == 1024 * MIB


def test_small_buckets_on_many_ranks_wait_for_latency() -> None:
    """Reduce-scatters over 512 ranks of Eos: those of 25 MiB are latency, those of the default bandwidth."""
    run, network = spec(512, zero_stage=1), load_machine("eos", "bf16", 512).network

    def seconds_per_byte(num_bytes: float) -> float:
        return network.seconds(Traffic("reduce_scatter", ("data",), num_bytes * 511 / 512), run.mesh) / num_bytes

    bandwidth = seconds_per_byte(1e15)
    assert seconds_per_byte(bucket_bytes(25, 512, True)) > 8 * bandwidth
    assert seconds_per_byte(bucket_bytes(None, 512, True)) < 1.2 * bandwidth
