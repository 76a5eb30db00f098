"""Runs of rules that need whole matrices: their steps with random gradients in any layout, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.model.local_sizes import KERNELS
from megatron3d.model.params import normal_box, part_views
from megatron3d.optim.rule_spec import is_hidden_matrix
from megatron3d.pipeline.lower import lower
from megatron3d.train.checkpointing import LoadOptions, describe, load_state, source_of
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches, run_rank, step_totals
from tests.support.turn_ranks import connect

# The process group of a dry run receives a reduce-scatter's sum, as NCCL does.
KERNEL = replace(KERNELS["cpu"], num_received=0)

VOCAB_SIZE = 61
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ZeRO 0": {},
    "ZeRO 1": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "ZeRO 2, HSDP": {"zero_stage": 2, "num_distributed_optimizer_instances": 2},
    "2-D": {"tensor_parallel_mode": "2d", "tensor_parallel_shape": [2, 2]},
}
# In which an update has the peak.
MEMORY_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"zero_stage": 1}),
    (4, {"zero_stage": 2, "tensor_model_parallel_size": 2}),
    (4, {"zero_stage": 3}),
    (4, {"zero_stage": 1, "pipeline_model_parallel_size": 2}),
    (8, {"tensor_parallel_mode": "3d", "tensor_parallel_shape": [2, 2, 2]}),
]


def configure(layout: str, precision: str = "fp64", **optimizer: Any) -> Config:
    """Return a tiny run in a layout."""
    train = {"micro_batch_size": 2, "global_batch_size": 8, "precision": precision}
    sections = {"model": MODEL, "parallel": LAYOUTS[layout], "train": train}
    return Config.model_validate({**sections, "optimizer": {"clip_grad": 0.0, **optimizer}})


def build(rank: int, world_size: int, config: Config) -> TrainState:
    """Return its state at the start."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    state.buffers.settle()
    return state


def train_with_random_gradients(rank: int, world_size: int, config: Config, num_steps: int = 2) -> dict[str, Tensor]:
    """Return the matrices after steps with gradients that follow from the seeds 1, 2, ..."""
    state = build(rank, world_size, config)
    buffers, mesh = state.buffers, state.model.comm.mesh
    for iteration in range(num_steps):
        buffers.settle()
        for name, start, values in buffers.shards("grad"):
            for part, box, view in part_views(buffers.specs[name], values, mesh, start):
                view.copy_(normal_box(iteration + 1, part.name, part.shape, box))
        state.optimizer.step(torch.tensor(1.0), 0.1, iteration=iteration)
    buffers.settle()
    found = {}
    for name, spec in buffers.specs.items():
        for part, box, view in part_views(spec, state.model.get_parameter(name), mesh):
            if is_hidden_matrix(name, spec):
                whole = torch.zeros(part.shape, dtype=view.dtype)
                whole[tuple(slice(*edges) for edges in box)] = view / spec.num_copies(mesh, mesh.names)
                found[part.name] = state.model.comm.all_reduce(whole, mesh.names).wait()
    return found


def initial_matrices(config: Config) -> dict[str, Tensor]:
    """Return the logical tensors of all parameters at the start, in float64."""
    whole = {}
    for spec in build(0, 1, configure("one rank")).buffers.specs.values():
        for part in spec.parts:
            box = tuple((0, size) for size in part.shape)
            whole[part.name] = normal_box(config.train.seed, part.name, part.shape, box).mul(spec.init).double()
    return whole


def random_gradient(seed: int, name: str, shape: Iterable[int]) -> Tensor:
    """Return the whole gradient of a logical tensor that follows from a seed."""
    sizes = tuple(shape)
    return normal_box(seed, name, sizes, tuple((0, size) for size in sizes)).double()


def train_and_save(rank: int, world_size: int, config: Config, source: Path | None, root: Path, num_steps: int) -> None:
    """Train steps, from a checkpoint if one is given, and save."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state = build_state(spec, connect(spec), torch.device("cpu"))
    if source is not None:
        load_state(source, state, {}, LoadOptions(accept=frozenset(config.checkpoint.accept_changed)))
    for _ in range(num_steps):
        train_step(state, microbatches(spec), 0.01, StepSettings(config.train.seed, 64, 8))
    pieces = source_of(state)(lambda tensor: tensor)
    store.save(root, state.iteration, pieces, describe(state, {}, config), state.model.comm)


def parts_of(names: Iterable[str], kind: str) -> set[str]:
    """Return the logical tensors of which there is a kind of tensor."""
    return {name.removeprefix(f"{kind}.") for name in names if name.startswith(f"{kind}.")}


def check_memory(num_ranks: int, parallel: dict[str, Any], precision: str, optimizer: dict[str, Any]) -> None:
    """Compare the predicted state and the peak of an update with a dry run, on the first and the last rank."""
    model = {**MODEL, "num_layers": 4, "hidden_size": 256}
    train = {"micro_batch_size": 2, "global_batch_size": 16, "precision": precision}
    sections = {"model": model, "parallel": parallel, "train": train, "optimizer": optimizer}
    for rank in {0, num_ranks - 1}:
        spec = RunSpec(Config.model_validate(sections), num_ranks, VOCAB_SIZE, rank)
        run, memory = run_rank(spec), predict_memory(spec, KERNEL)
        assert run.between["optimizer"] == memory.optimizer
        if parallel.get("zero_stage", 0) < 2:  # otherwise whole gradients have the peak, which are freed by then
            measured = step_totals(run, lower(spec.schedule)[run.coord]).peak
            assert memory.transient_peaks["update"] == max(memory.transient_peaks.values())
            assert memory.total == pytest.approx(measured, rel=0.02)
