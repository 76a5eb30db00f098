"""Fact: memory that only GPUs need is counted: workspaces of attention and GEMMs, communicators, and the CUDA context.

A model that left one of them out would choose layouts that end with an out-of-memory error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import (
    buffers,
    library_bytes,
    num_communicators,
    rank_memory,
    symmetric_bytes,
)
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.memory.sweep import residual_shards
from megatron3d.forecast.time.hardware import FOLDER, file_names, load_accelerator
from megatron3d.model.attention_operations import sdpa_workspace
from megatron3d.model.local_sizes import KERNELS
from megatron3d.parallel.mesh import Link
from megatron3d.pipeline.actions import RECEIVES

MODEL = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 96, "ffn_hidden_size": 512}
WITH_KERNELS = ("a100", "h100_sxm", "h200", "v100_sxm")


def spec(num_ranks: int = 1, model: dict[str, Any] | None = None, **parallel: Any) -> RunSpec:
    train = {"precision": "bf16", "micro_batch_size": 2, "global_batch_size": 32}
    config = Config.model_validate({"model": {**MODEL, **(model or {})}, "parallel": parallel, "train": train})
    return RunSpec(config, num_ranks, 500)


def test_attention_has_the_workspace_of_flash_attention() -> None:
    """96 rows become 128, heads of 32 stay; 4 key heads for 8 query heads need a dK and a dV of each of the 8."""
    plain = make_step_spec(spec(), KERNELS["gpu"]).local
    sums = 2 * 128 * 8 * (32 + 1) * 4
    assert sdpa_workspace(plain) == sums
    grouped = make_step_spec(spec(model={"family": "llama", "num_query_groups": 4}), KERNELS["gpu"]).local
    assert sdpa_workspace(grouped) == sums + 2 * (2 * 96 * 8 * 32) * 2
    dropout = make_step_spec(spec(model={"attention_dropout": 0.1}), KERNELS["gpu"]).local
    assert sdpa_workspace(dropout) == sdpa_workspace(make_step_spec(spec()).local) == 0


def test_workspaces_are_on_gpus_only() -> None:
    on_gpu, on_cpu = (make_step_spec(spec(), KERNELS[kind]) for kind in ("gpu", "cpu"))
    without = make_step_spec(spec(), replace(KERNELS["gpu"], sdpa_workspace=False))
    peaks, before = rank_memory(on_gpu).transient_peaks, rank_memory(without).transient_peaks
    grown = {name: size - before[name] for name, size in peaks.items() if size != before[name]}
    assert grown == {"backward of attention.core": sdpa_workspace(on_gpu.local)}
    assert buffers(on_gpu)["GEMM workspace"] == 2 * 32 * 2**20 and buffers(on_cpu)["GEMM workspace"] == 0


def test_collectives_in_rounds_have_a_buffer_per_group() -> None:
    """Two parts of 96 x 256 leave a row-parallel linear of 192 tokens on 2 ranks: more than a shard of X or dY."""
    rounds = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}
    on_gpu, on_cpu = (make_step_spec(spec(2, **rounds), KERNELS[kind]).local for kind in ("gpu", "cpu"))
    assert symmetric_bytes(on_gpu) == 2 * 96 * 256 * 2
    plain = make_step_spec(spec(2, **{**rounds, "tp_comm_overlap": False}), KERNELS["gpu"]).local
    assert symmetric_bytes(on_cpu) == symmetric_bytes(plain) == 0


def test_sends_that_the_cpu_has_started_are_held() -> None:
    """GPipe's first rank sends all its forwards before it receives: the engine lets four be while it starts a fifth."""
    step = make_step_spec(spec(4, pipeline_model_parallel_size=4, pipeline_schedule="gpipe"), KERNELS["gpu"])
    first_receive = next(at for at, action in enumerate(step.actions) if action.kind in RECEIVES)
    assert max(residual_shards(step)[:first_receive]) == 5


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank": (1, {}, 0),
    "data parallelism alone is the world": (8, {}, 1),
    "tensor and data parallelism, and no group of all ranks": (8, {"tensor_model_parallel_size": 2}, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_communicators_by_hand(name: str) -> None:
    num_ranks, parallel, expected = LAYOUTS[name]
    state = spec(num_ranks, **parallel).parallel_state
    assert num_communicators(state) == expected
    rates = load_accelerator("h200").kernels
    assert rates is not None
    size = (rates.context_gib + expected * rates.communicator_gib) * 2**30
    assert library_bytes(state, rates) == pytest.approx(size, abs=1)


def test_a_rank_amid_the_pipeline_has_more_links_than_its_ends() -> None:
    state = spec(4, model={"tie_embeddings": False}, pipeline_model_parallel_size=4).parallel_state
    each = [num_communicators(state.on_rank(rank)) for rank in range(4)]
    assert each[1] == each[2] > each[0] == each[3]
    assert state.on_rank(1).my_links == (Link("pipeline", 0, 1), Link("pipeline", 1, 2))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_accelerators_name_the_memory_of_their_libraries(name: str) -> None:
    rates = load_accelerator(name).kernels
    assert rates is not None and name in file_names(FOLDER)
    assert 0.3 <= rates.context_gib <= 1 and 0.2 <= rates.communicator_gib <= 0.6
    assert rates.memory_gib > 15
