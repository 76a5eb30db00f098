"""Fact: a training step moves over the data axis what the closed form of its ZeRO stage says.

This is 2 (d-1)/d of the parameters with stages 0 and 1; stages 2 and 3 move the tensors that they shard again for every
microbatch; HSDP adds an all-reduce between replicas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.parallel.mesh import DATA
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.turn_ranks import connect, run_turns

CPU, NUM_RANKS, MICROBATCHES = torch.device("cpu"), 4, 3
THREE_NUMBERS = 3 * 4  # loss, norm and the stop flag
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 64}


def configure(**keys: Any) -> Config:
    parallel = {name: value for name, value in keys.items() if name != "precision"}
    train = {"micro_batch_size": 1, "global_batch_size": NUM_RANKS * MICROBATCHES, "bucket_mb": 0.02}
    config = Config.model_validate(
        {"model": MODEL, "parallel": parallel, "train": train | {"precision": keys.get("precision", "fp32")}}
    )
    assert check(config, NUM_RANKS, None) == []
    return config


def moved(rank: int, world_size: int, config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that the second step sends along each data axis, recorded and in closed form."""
    spec = RunSpec(config, world_size, 0, rank)
    plain = connect(spec)
    comm = Recorder(plain)
    state = build_state(spec, comm, CPU)
    arch = spec.arch
    loader = BatchLoader(
        RandomSamples(1, arch.vocab_size, arch.seq_length), comm.mesh, (), 1, NUM_RANKS * MICROBATCHES, CPU
    )
    settings = StepSettings(1, NUM_RANKS * MICROBATCHES * arch.seq_length, NUM_RANKS * MICROBATCHES)
    for _ in range(2):
        comm.calls.clear()
        train_step(state, loader.step(state.consumed_samples), 1e-3, settings)
    calls = list(comm.calls)
    state.buffers.settle()
    sent = dict.fromkeys(DATA, 0.0)
    for call in calls:
        if set(call.axes) <= {*DATA}:
            sent["x".join(call.axes)] = sent.get("x".join(call.axes), 0.0) + call.wire_bytes
    sizes, stage, m = comm.mesh.sizes, config.parallel.zero_stage, MICROBATCHES
    elements = sum(flat.numel for flat in state.buffers.flat_buffers)
    grads, params = elements * 4, elements * state.buffers.flat_buffers[0].params.element_size()
    joined = "x".join(comm.mesh.nontrivial(DATA))
    expected = dict.fromkeys(DATA, 0.0) | {joined: 2 * ring(NUM_RANKS) * (grads * (stage == 0) + THREE_NUMBERS)}
    if stage:
        scatters, gathers = m if stage >= 2 else 1, 2 * m if stage == 3 else 1
        expected["data"] += ring(sizes["data"]) * (scatters * grads + gathers * params)
        expected["replica"] += 2 * ring(sizes["replica"]) * scatters * grads / sizes["data"]
    return sent, expected


def ring(ranks: int) -> float:
    """Return the fraction of a tensor that each of p ranks of a ring sends."""
    return (ranks - 1) / ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_sends_the_bytes_of_its_zero_stage(zero_stage: int, groups: int, precision: str) -> None:
    config = configure(zero_stage=zero_stage, num_distributed_optimizer_instances=groups, precision=precision)
    for recorded, expected in run_turns(moved, NUM_RANKS, config):
        assert recorded == pytest.approx(expected)
