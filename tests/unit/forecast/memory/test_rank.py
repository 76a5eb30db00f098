"""Fact: predicted weights, gradients and optimizer states are what ranks hold, to the byte, in all layouts.

Together with microbatches in flight and transient memory they are a step's peak.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from common.live import Live
from torch import Tensor

from megatron3d.checkpoint.async_saver import Snapshot
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.forecast.memory.activations import recomputed_activations
from megatron3d.forecast.memory.flat_buffers import flat_buffer_sizes
from megatron3d.forecast.memory.rank import (
    in_flight,
    predict_memory,
    rank_memory,
    snapshot_bytes,
    stage_activations,
)
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.linear.gemm import onednn_gemms
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.operation import HASH_CHUNK
from megatron3d.model.spec import Recompute
from megatron3d.ops.dropout import CPU_HASH_CHUNK
from megatron3d.optim.adamw import CPU_CHUNK, GPU_CHUNK
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.engine import MAX_SENDS_IN_FLIGHT
from megatron3d.train.checkpointing import source_of
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.pool import Pool
from tests.support.turn_ranks import connect, run_turns

NUM_RANKS, VOCAB_SIZE = 8, 509
CPU = torch.device("cpu")
MODEL = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 8, "kv_channels": 8, "seq_length": 24}
TRAIN = {"micro_batch_size": 4, "global_batch_size": 16, "loss_chunk_tokens": 40}


def flat_numels(step: StepSpec) -> list[int]:
    return [piece.size for piece in flat_buffer_sizes(step)]


def configure(model: dict[str, Any], parallel: dict[str, Any], **train: Any) -> Config:
    optimizer = {"exp_avg_dtype": "bf16"} if train.get("precision") == "bf16" else {}
    sections = {"model": MODEL | model, "parallel": parallel, "train": TRAIN | train, "optimizer": optimizer}
    config = Config.model_validate(sections)
    assert check(config, NUM_RANKS, VOCAB_SIZE) == []
    return config


def layouts() -> list[Config]:
    """Return every mode and form, alone and with data parallelism or a pipeline."""
    configs = []
    for mode, entry in MODES.items():
        for form in entry.forms:
            for size, pipeline, precision in ((8, 1, "fp32"), (4, 1, "bf16"), (4, 2, "fp32")):
                parallel = {"tensor_parallel_mode": mode, "tensor_parallel_form": form}
                parallel |= {"tensor_model_parallel_size": size, "pipeline_model_parallel_size": pipeline}
                family = {"family": "llama", "ffn_hidden_size": 40} if precision == "bf16" else {"family": "gpt2"}
                configs.append(configure(family, parallel, precision=precision))
    for zero_stage, instances in ((1, 1), (2, 2), (3, 1), (3, 2)):
        for precision in ("fp32", "bf16"):
            parallel = {"zero_stage": zero_stage, "num_distributed_optimizer_instances": instances}
            parallel |= {"tensor_model_parallel_size": 2}
            configs.append(configure({}, parallel, global_batch_size=32, precision=precision, bucket_mb=0.05))
    configs += [configure({}, {"context_parallel_size": 4, "zero_stage": stage}, bucket_mb=0.05) for stage in (0, 1, 3)]
    return configs


def states(state: TrainState) -> dict[str, list[Tensor]]:
    """Return persistent bytes by category; master weights of the model's own dtype are its weights."""
    flats = state.buffers.flat_buffers
    return {
        "weights": [t for flat in flats for t in (flat.params, flat.main) if t.dtype == flat.params.dtype],
        "main weights": [flat.main for flat in flats if flat.main.dtype != flat.params.dtype],
        "gradients": [flat.grad for flat in flats],
        "optimizer": [shard.values for shard in state.optimizer.state],
    }


def num_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def lasting(rank: int, world_size: int, config: Config) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a rank holds between steps, measured and expected."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    comm = connect(spec)
    tensors = states(build_state(spec, comm, CPU))
    measured = {name: num_bytes(of_category) for name, of_category in tensors.items()}
    expected = predict_memory(spec).categories
    return measured, {name: expected[name] for name in measured}


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_persistent_memory_is_exact_in_every_mode(turn: int) -> None:
    for config in layouts()[turn::3]:
        for rank, (measured, expected) in enumerate(run_turns(lasting, NUM_RANKS, config)):
            assert measured == expected, f"rank {rank}: {config.parallel}"


def snapshot_sizes(rank: int, world_size: int, config: Config) -> tuple[int, int]:
    """Return the bytes of the copy for an asynchronous save, measured and expected."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    snapshot = Snapshot(CPU)
    snapshot.allocate(source_of(build_state(spec, connect(spec), CPU)))
    return snapshot.num_bytes, snapshot_bytes(make_step_spec(spec))


@pytest.mark.parametrize(
    "parallel", [{}, {"tensor_model_parallel_size": 2, "zero_stage": 1}, {"pipeline_model_parallel_size": 2}], ids=str
)
@pytest.mark.parametrize("rule", ["adam", "soap"])
def test_the_copy_for_an_asynchronous_save(parallel: dict[str, Any], rule: str) -> None:
    """Catches ranks that copy what other replicas write, and memory that is rounded up."""
    config = configure({}, parallel, precision="bf16", global_batch_size=32)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"optimizer": rule})})
    for measured, expected in run_turns(snapshot_sizes, NUM_RANKS, config):
        assert 0.85 < expected / measured < 1.15, f"{measured} bytes, not {expected}"
    config = configure({}, parallel, global_batch_size=32)
    saving = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"save": "run", "async_save": True})}
    )
    sizes = [predict_memory(RunSpec(each, NUM_RANKS, VOCAB_SIZE)).total for each in (config, saving)]
    assert sizes[1] - sizes[0] == snapshot_bytes(make_step_spec(RunSpec(saving, NUM_RANKS, VOCAB_SIZE)))


def step_peak(rank: int, world_size: int, config: Config) -> tuple[int, int]:
    """Return a step's peak on top of the persistent bytes, measured and expected."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    comm = connect(spec)
    state, train, arch = build_state(spec, comm, CPU), config.train, spec.arch
    samples = RandomSamples(1, arch.vocab_size, arch.seq_length)
    batch_axes, sizes = spec.mode.batch_axes, (train.micro_batch_size, train.global_batch_size)
    batch = BatchLoader(samples, comm.mesh, batch_axes, *sizes, CPU).step(0)
    settings = StepSettings(1, train.global_batch_size * arch.seq_length, train.global_batch_size)
    # Nothing here may hold these tensors: a step that shards gradients frees those of the step before.
    with Live(chain(*states(state).values(), (microbatch.tokens for microbatch in batch))) as live:
        train_step(state, batch, 1e-3, settings)
    adds_dw = train.precision == "bf16" or (train.precision == "fp32" and onednn_gemms(CPU, torch.float32) == "all")
    memory = predict_memory(spec, replace(KERNELS["cpu"], adds_dw=adds_dw))
    lasts = memory.weights + memory.main_weights + memory.gradients + memory.optimizer
    return live.peak - lasts, memory.total - lasts


KEEP_WEIGHTS = {"tp_keep_gathered_weights": True}
STEPS: dict[str, Config] = {
    "one product per matmul": configure({"num_layers": 2}, {}, global_batch_size=64, precision="bf16"),
    "attention with dropout": configure(
        {"hidden_dropout": 0.1, "attention_dropout": 0.1, "num_layers": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        precision="bf16",
    ),
    "operands gathered along both dimensions": configure(
        {"family": "llama", "ffn_hidden_size": 64, "num_layers": 2},
        {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8},
    ),
    "a pipeline": configure(
        {}, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}, loss_chunk_tokens=1000
    ),
    "a split backward": configure(
        {"family": "llama", "ffn_hidden_size": 64},
        {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
        precision="bf16",
    ),
    "gradients shared out": configure(
        {"hidden_size": 96}, {"tensor_model_parallel_size": 2, "zero_stage": 2}, global_batch_size=32, bucket_mb=0.2
    ),
    "weights shared out": configure(
        {"family": "llama", "ffn_hidden_size": 64, "hidden_size": 96},
        {"tensor_model_parallel_size": 2, "zero_stage": 3},
        global_batch_size=32,
    ),
    "whole layers again": configure(
        {"hidden_dropout": 0.1},
        {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
        recompute_granularity="full",
        recompute_num_layers=2,
    ),
    "context ranks": configure(
        {"family": "llama", "ffn_hidden_size": 64, "num_query_groups": 4},
        {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "zero_stage": 1},
    ),
    "context ranks in bf16": configure(
        {"num_layers": 8, "seq_length": 64},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        precision="bf16",
    ),
    "gathered weights that stay": configure(
        {"num_layers": 8}, {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8, **KEEP_WEIGHTS}
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_needs_the_predicted_memory(pool: Pool, name: str) -> None:
    for rank, (measured, expected) in enumerate(pool.run(step_peak, NUM_RANKS, STEPS[name])):
        assert 0.93 < expected / measured < 1.15, f"rank {rank} needs {measured} bytes, not {expected}"


def step(model: dict[str, Any], parallel: dict[str, Any], **train: Any) -> StepSpec:
    """Return the step spec of rank 0."""
    config = configure(model, parallel, **train)
    return make_step_spec(RunSpec(config, NUM_RANKS, VOCAB_SIZE))


# Microbatches of each stage on each rank at the peak, for 4 ranks, 8 microbatches and equal layers.
IN_FLIGHT = {
    "gpipe": [{0: 8}, {1: 8}, {2: 8}, {3: 8}],
    "1f1b": [{0: 4}, {1: 3}, {2: 2}, {3: 1}],
    "interleaved": [{0: 8, 4: 3}, {1: 5, 5: 4}, {2: 4, 6: 3}, {3: 4, 7: 1}],
}


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_microbatches_in_flight_by_hand(schedule: str) -> None:
    """1F1B holds p - r; interleaving 2 (p - r - 1) + p forwards before a backward, and one more, in groups of p.

    On rank 0 an eighth microbatch of the stage with the embedding replaces the first one of the other stage.
    """
    parallel = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2, "pipeline_schedule": schedule}
    mine = step({"num_layers": 8}, parallel, global_batch_size=32)
    for coord, expected in enumerate(IN_FLIGHT[schedule]):
        rank = mine.on_pipeline_rank(coord)
        assert in_flight(rank) == expected
        on_gpus = replace(rank, local=replace(rank.local, kernels=KERNELS["gpu"]))
        sizes = {stage.index: stage_activations(on_gpus, stage) for stage in rank.stages}
        assert rank_memory(on_gpus).activations == sum(count * sizes[stage] for stage, count in expected.items())


def shares(step: StepSpec, zero_stage: int) -> tuple[int, int, int, int]:
    """Return the bytes of weights, master weights, gradients and optimizer."""
    memory = rank_memory(replace(step, zero_stage=zero_stage))
    return memory.weights, memory.main_weights, memory.gradients, memory.optimizer


def shard(size: int, num_ranks: int) -> int:
    """Return the elements of a shard, a multiple of 128 if it has 8192 or more."""
    part = -(-size // num_ranks)
    return part if part < 8192 else part + -part % 128


def test_zero_shards_the_state_of_its_stage() -> None:
    """bf16 with bf16 momentum: 2 bytes of weights, 4 of master weights, 4 of gradients, 2 + 4 of moments.

    In ZeRO 3 only the master weights remain between steps.
    """
    mine = step({}, {"tensor_model_parallel_size": 2}, global_batch_size=32, precision="bf16")
    numel = sum(flat_numels(mine))
    part = sum(shard(size, 4) for size in flat_numels(mine))
    assert 0 < 4 * part - numel < 4 * 128 * len(flat_numels(mine)), "some are padded"
    assert shares(mine, 0) == (2 * numel, 4 * numel, 4 * numel, 6 * numel)
    assert shares(mine, 1) == (8 * part, 4 * part, 16 * part, 6 * part)
    assert shares(mine, 2) == (8 * part, 4 * part, 4 * part, 6 * part)
    by_block = sum(shard(size, 4) for size in flat_numels(replace(mine, zero_stage=3)))
    assert shares(mine, 3) == (0, 4 * by_block, 4 * by_block, 6 * by_block)


def test_in_fp32_main_weights_are_the_weights() -> None:
    mine = step({}, {}, global_batch_size=32)
    numel = sum(flat_numels(mine))
    assert shares(mine, 0) == (4 * numel, 0, 4 * numel, 8 * numel)
    part = sum(shard(size, 8) for size in flat_numels(replace(mine, zero_stage=3)))
    assert shares(mine, 3) == (4 * part, 0, 4 * part, 8 * part)


def test_each_zero_stage_needs_less_memory() -> None:
    mine = step({"num_layers": 12}, {"tensor_model_parallel_size": 2}, global_batch_size=32, bucket_mb=0.1)
    totals = [rank_memory(replace(mine, zero_stage=stage)).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_flat_buffers_are_filled_from_the_end() -> None:
    """Flat buffers have at least a bucket of 9000 elements; a norm has 48 weights and 48 biases."""
    mine = step({"num_layers": 1}, {}, global_batch_size=32, bucket_mb=4 * 9000 / 2**20)
    norm, fc2, fc1, proj, qkv = 2 * 48, 48 * 192 + 48, 48 * 192 + 192, 48 * 64 + 48, 48 * 192 + 192
    positions, words = 24 * 48, 512 * 48
    assert flat_numels(mine) == [fc2 + norm, fc1, qkv + proj + norm, words + positions + norm]


def test_constants_equal_those_of_the_code_that_they_describe() -> None:
    assert (KERNELS["cpu"].update_piece, KERNELS["gpu"].update_piece) == (CPU_CHUNK, GPU_CHUNK)
    assert KERNELS["cpu"].num_leaving == MAX_SENDS_IN_FLIGHT
    assert HASH_CHUNK == CPU_HASH_CHUNK
    assert KERNELS["gpu"].num_leaving == MAX_SENDS_IN_FLIGHT + 1, "the CPU runs ahead of all sends that it may start"


def test_full_recomputation_keeps_inputs_and_one_layer_at_its_peak() -> None:
    mine = step({"num_layers": 8}, {"tensor_model_parallel_size": 8}, precision="bf16")
    full = replace(mine, local=replace(mine.local, recompute=Recompute("full")))
    everything, inputs = rank_memory(mine), rank_memory(full)
    assert everything.activations - inputs.activations == 8 * recomputed_activations(full.local)
    assert inputs.transient_peaks["backward of mlp.fc2"] - everything.transient_peaks[
        "backward of mlp.fc2"
    ] == recomputed_activations(full.local)
