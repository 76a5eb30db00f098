"""Fact: for all pairs of layouts, a checkpoint of one resumes under the other like a run that never stopped.

Losses, gradient norms, weights and moments of the next step, after the checkpoint of one process of the next two, agree
in float64 within 1e-10.  What one layout of
experts loads from another and saves again has the same bits.
"""

from __future__ import annotations

import math
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.attention.context.plan import CONTEXT_EXCHANGES
from megatron3d.checkpoint.store import read_index, verify
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.optim.optimizer import learning_rate
from megatron3d.parallel.modes import MODES
from megatron3d.train.checkpointing import load_state, source_of
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.checkpoints import save_state
from tests.support.tiny_run import stored
from tests.support.turn_ranks import connect, run_turns

VOCAB_SIZE, NUM_RANKS, NUM_STEPS, BATCH, TOLERANCE = 61, 4, 2, 8, 1e-10
IDENTITY = {"tokenizer": "a", "corpus": "b", "data.split": "1,0,0", "train.seed": 1234}
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "seq_length": 8,
        "make_vocab_size_divisible_by": 1,
        "hidden_dropout": 0.1,
        "add_mlp_bias": False,
        "num_moe_experts": 4,
        "moe_layer_freq": 2,
        "moe_ffn_hidden_size": 16,
        "mtp_num_layers": 1,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "optimizer": {"lr": 1e-2, "clip_grad": 0.5, "lr_warmup_iters": 1, "ema_decay": 0.9},
}


def tensor(mode: str, *shape: int, form: str | None = None) -> dict[str, Any]:
    return {"tensor_parallel_mode": mode, "tensor_parallel_shape": shape, "tensor_parallel_form": form}


def pipeline(ranks: int, schedule: str) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": ranks, "pipeline_schedule": schedule}


def experts(ranks: int, split: int = 1) -> dict[str, Any]:
    return {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": split}


def context(ranks: int, exchange: str) -> dict[str, Any]:
    return {"context_parallel_size": ranks, "cp_comm_type": exchange}


# The last layout is one process; embeddings are tied, so that some pipelines hold them twice.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1d, data 2, experts 4": {**tensor("1d", 2), **experts(4)},
    "1d with sequences, experts 2": {**tensor("1d", 4, form="sequence_parallel"), **experts(2)},
    "2d, experts 2 split over 2": {**tensor("2d", 2, 2), **experts(2, 2)},
    "2.5d": tensor("2.5d", 2, 1, 2),
    "3d, experts 2": {**tensor("3d", 1, 2, 2), **experts(2)},
    "grid, 1f1b": {**tensor("grid", 2, 1, 1), **pipeline(2, "1f1b")},
    "zb-h1": pipeline(4, "zb-h1"),
    "zb-v, ZeRO 3, experts 2": {**pipeline(2, "zb-v"), "zero_stage": 3, **experts(2)},
    "interleaved, context 2, ZeRO 2": {**pipeline(2, "interleaved"), "context_parallel_size": 2, "zero_stage": 2},
    "context 2, heads exchanged, ZeRO 3": {**tensor("1d", 2), **context(2, "a2a"), "zero_stage": 3},
    "context 4 in a ring, experts split over 2": {**context(4, "p2p"), **experts(1, 2)},
    "context 2 x 2": {**context(4, "a2a+p2p"), "hierarchical_context_parallel_sizes": (2, 2), "zero_stage": 1},
    "ZeRO 1 in groups, experts 2": {"zero_stage": 1, "num_distributed_optimizer_instances": 2, **experts(2)},
    "ZeRO 2, experts 2 of 4": {"zero_stage": 2, **experts(2)},
    "ZeRO 3 in groups, experts 2 split over 2": {
        "zero_stage": 3,
        "num_distributed_optimizer_instances": 2,
        **experts(2, 2),
    },
    "one process": {},
}
SPREAD = [name for name in LAYOUTS if name != "one process"]
FOLDED = [name for name in SPREAD if "expert_model_parallel_size" in LAYOUTS[name]]


def configure(name: str) -> Config:
    """Use as many sequences per microbatch as the rules allow, and in a pipeline at least two microbatches."""
    ranks, least = (NUM_RANKS, 2) if "pipeline_schedule" in LAYOUTS[name] else (NUM_RANKS if name in SPREAD else 1, 1)
    for micro in (8, 4, 2, 1):
        train = {"precision": "fp64", "bucket_mb": 0.01, "micro_batch_size": micro, "global_batch_size": BATCH}
        config = Config.model_validate({**SECTIONS, "parallel": LAYOUTS[name], "train": train})
        if not check(config, ranks, VOCAB_SIZE) and RunSpec(config, ranks).num_microbatches >= least:
            return config
    raise AssertionError(f"no batch fits {name}: {check(config, ranks, VOCAB_SIZE)}")


def num_further_steps(source: str) -> int:
    """Return how many steps each layout trains from a source: one shows all that was loaded, as the moments show."""
    return 2 if source == "one process" else 1


def advance(config: Config, state: TrainState, num_steps: int) -> list[float]:
    """Train more steps; return loss and gradient norm of each."""
    mesh, train, arch = state.model.comm.mesh, config.train, state.model.arch
    samples = RandomSamples(train.seed, VOCAB_SIZE, arch.seq_length)
    axes, device = state.spec.mode.batch_axes, torch.device("cpu")
    loader = BatchLoader(samples, mesh, axes, train.micro_batch_size, train.global_batch_size, device)
    settings = StepSettings(train.seed, train.global_batch_size * arch.seq_length, train.global_batch_size)
    numbers: list[float] = []
    for _ in range(num_steps):
        lr = learning_rate(config.optimizer, state.spec.lr_phases, state.iteration + 1)
        result = train_step(state, loader.step(state.consumed_samples), lr, settings)
        numbers += [result.loss.item(), result.grad_norm.item()]
    return numbers


def build(rank: int, world_size: int, config: Config) -> TrainState:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return build_state(spec, connect(spec), torch.device("cpu"))


def write(rank: int, world_size: int, config: Config, root: Path) -> None:
    """Save a layout's checkpoint after two steps in that layout."""
    state = build(rank, world_size, config)
    advance(config, state, NUM_STEPS)
    save_state(root, state, IDENTITY)


def read(rank: int, world_size: int, config: Config, root: Path) -> dict[str, list[float]]:
    """Return for each checkpoint the losses and norms of further steps, and the distances from an uninterrupted run.

    The distances are the largest ones in this rank's weights and moments.
    """
    never_stopped = {num: stored(root / "never stopped", NUM_STEPS + num) for num in {*map(num_further_steps, LAYOUTS)}}
    state, found = build(rank, world_size, config), {}
    for source in LAYOUTS:
        expected = never_stopped[num_further_steps(source)]
        scale = {kind: max(t.abs().max().item() for n, t in expected.items() if kind_of(n) == kind) for kind in KINDS}
        load_state(root / source / f"iter_{NUM_STEPS:07d}", state, IDENTITY)
        assert (state.iteration, state.consumed_samples) == (NUM_STEPS, BATCH * NUM_STEPS)
        numbers, errors = advance(config, state, num_further_steps(source)), dict.fromkeys(KINDS, 0.0)
        for piece in source_of(state)(lambda tensor: tensor):
            kind, whole = kind_of(piece.name), expected[piece.name]
            region = whole[tuple(slice(*ends) for ends in piece.box)]
            unit = max(whole.abs().max().item(), 1e-3 * scale[kind])
            errors[kind] = max(errors[kind], (piece.tensor - region).abs().max().item() / unit)
        found[source] = [*numbers, *errors.values()]
    return found


KINDS = ("model", "optimizer", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.ema")


def kind_of(name: str) -> str:
    return next(kind for kind in reversed(KINDS) if name.startswith(f"{kind}."))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of each layout, and the last two of the run that never stopped."""
    root = tmp_path_factory.mktemp("layouts")
    alone = configure("one process")
    write(0, 1, alone, root / "one process")
    state, numbers = build(0, 1, alone), list[float]()
    advance(alone, state, NUM_STEPS)
    for _ in range(num_further_steps("one process")):
        numbers += advance(alone, state, 1)
        save_state(root / "never stopped", state, IDENTITY)
    (root / "numbers").write_text(" ".join(map(repr, numbers)))
    for name in SPREAD:
        run_turns(write, NUM_RANKS, configure(name), root / name)
    return root


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_layout_continues_every_other(root: Path, target: str) -> None:
    config = configure(target)
    results = run_turns(read, NUM_RANKS, config, root) if target in SPREAD else [read(0, 1, config, root)]
    expected = [float(text) for text in (root / "numbers").read_text().split()]
    worst = dict.fromkeys(LAYOUTS, 0.0)
    for result in results:
        assert result.keys() == LAYOUTS.keys()
        for source, values in result.items():
            numbers, errors = values[: -len(KINDS)], values[-len(KINDS) :]
            assert len(numbers) == 2 * num_further_steps(source)
            distances = [abs(a / b - 1) for a, b in zip(numbers, expected, strict=False)]
            worst[source] = max(worst[source], *distances, *errors)
    assert {source: error for source, error in worst.items() if not error <= TOLERANCE} == {}


def save_again(rank: int, world_size: int, config: Config, source: Path, root: Path) -> None:
    """Load another layout's checkpoint, and save it."""
    state = build(rank, world_size, config)
    load_state(source, state, IDENTITY)
    save_state(root, state, IDENTITY)


@pytest.mark.parametrize(("source", "target"), random.Random("foldings").sample([*permutations(FOLDED, 2)], 10))
def test_bits_survive_another_layout_of_experts(source: str, target: str, root: Path, tmp_path: Path) -> None:
    run_turns(save_again, NUM_RANKS, configure(target), root / source / f"iter_{NUM_STEPS:07d}", tmp_path)
    expected, found = stored(root / source, NUM_STEPS), stored(tmp_path, NUM_STEPS)
    assert found.keys() == expected.keys()
    assert {kind_of(name) for name in found} == set(KINDS)
    assert [name for name, tensor in expected.items() if not found[name].equal(tensor)] == []


def test_checkpoints_are_complete_and_sharded(root: Path) -> None:
    """All ranks write; where all hold equally much, no rank writes twice as much as another."""
    for name in SPREAD:
        folder = root / name / f"iter_{NUM_STEPS:07d}"
        assert verify(folder) == ()
        written = dict.fromkeys(range(NUM_RANKS), 0)
        for stored_tensor in read_index(folder).tensors.values():
            for box in stored_tensor.boxes:
                written[int(box.file[5:10])] += math.prod(high - low for low, high in box.box)
        assert min(written.values()) > 0, name
        if configure(name).parallel.pipeline_model_parallel_size == 1:
            assert max(written.values()) < 1.5 * min(written.values()), f"{name}: {written}"


def test_the_layouts_use_every_kind_of_axis() -> None:
    """The layouts include every mode and ZeRO stage, data parallelism, and pipelines that hold embeddings twice."""
    configs = [configure(name) for name in SPREAD]
    assert {config.parallel.tensor_parallel_mode for config in configs} == set(MODES)
    assert {config.parallel.zero_stage for config in configs} == {0, 1, 2, 3}
    assert {config.parallel.pipeline_model_parallel_size for config in configs} == {1, 2, 4}
    assert {RunSpec(config, NUM_RANKS).mesh.sizes["data"] for config in configs} == {1, 2, 4}
    exchanges = {config.parallel.cp_comm_type for config in configs if config.parallel.context_parallel_size > 1}
    assert exchanges == set(CONTEXT_EXCHANGES)
