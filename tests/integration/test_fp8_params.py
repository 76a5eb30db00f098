"""Fact: weights that are stored and all-gathered in fp8 are the bits of those that are quantized where they multiply.

Losses, gradients and updated weights of a run with `train.fp8_param_gather` are those without, bit for bit, in every
ZeRO stage and layout.  What they hold and send is predicted.  Blocks are smaller than a recipe's, so that flat shards
cut them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.forecast.memory.rank import rank_memory
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.traffic import step_flops, step_traffic
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.model.local_sizes import KERNELS
from megatron3d.pipeline.lower import lower
from megatron3d.train.checkpointing import load_state
from megatron3d.train.state import TrainState, build_state, check_replicas
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import run_rank, step_totals, with_few_microbatches
from megatron3d.verify.layouts import RandomSamples, differences
from tests.support.checkpoints import save_state
from tests.support.equality import MODELS, VOCAB_SIZE, configure, run_trace
from tests.support.fp8_rows import small_recipes
from tests.support.turn_ranks import connect, run_turns

CPU, BLOCK = torch.device("cpu"), 4
DENSE = {
    **MODELS["fewer key/value heads than ranks, QK-norm, tied"],
    "hidden_size": 64,
    "ffn_hidden_size": 64,
}
UNTIED = {**DENSE, "tie_embeddings": False, "mtp_num_layers": 0}
EXPERTS = {
    **MODELS["experts, shared experts, losses of routers"],
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "num_layers": 2,
}
SEQUENCES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Model, keys of the layout, and the number of ranks.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{f"ZeRO {stage}": (DENSE, {"zero_stage": stage}, 2) for stage in range(4)},
    **{f"untied, ZeRO {stage}": (UNTIED, {"zero_stage": stage}, 2) for stage in range(4)},
    "replicas": (DENSE, {"zero_stage": 3, "num_distributed_optimizer_instances": 2}, 4),
    "tensor": (DENSE, {**SEQUENCES, "zero_stage": 2}, 4),
    "cube": (DENSE, {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8}, 8),
    "pipeline": (DENSE, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_stage": 1}, 4),
    "experts": (EXPERTS, {"expert_model_parallel_size": 2, "zero_stage": 3}, 4),
    "split experts": (EXPERTS, {"expert_tensor_parallel_size": 2, "zero_stage": 1, **SEQUENCES}, 4),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in small_recipes(BLOCK).items():
        monkeypatch.setitem(RECIPES, name, recipe)


def fp8_config(case: str, recipe: str, gathers: bool, **train: Any) -> Config:
    model, parallel, _ = CASES[case]
    keys = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": gathers}
    micro = 8 if "tensor_parallel_mode" in parallel else 2
    config = configure(model, parallel, micro_batch_size=micro, global_batch_size=8, **keys, **train)
    # The norm is a sum of each flat buffer's: clipping by it would depend on which parameters share one.
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_grad": 0.0})})


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("case", [name for name in CASES if "untied" not in name])
def test_stored_weights_have_the_bits_of_quantized_ones(case: str, recipe: str) -> None:
    num_ranks = CASES[case][2]
    without, with_key = (fp8_config(case, recipe, gathers) for gathers in (False, True))
    assert check(with_key, num_ranks, VOCAB_SIZE) == []
    plain, stored = (run_turns(run_trace, num_ranks, config, 2)[0] for config in (without, with_key))
    assert plain is not None and stored is not None
    found = [line for line in differences(plain, stored, 0.0) if "gradient norm" not in line]
    assert found == []
    assert list(differences(plain, stored, 1e-14)) == []


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("case", ["ZeRO 0", "ZeRO 1", "ZeRO 3", "experts"])
def test_losses_in_bf16_have_the_same_bits(case: str, recipe: str) -> None:
    """Weights are rounded to the network's dtype before they are quantized."""
    configs = (fp8_config(case, recipe, gathers, precision="bf16") for gathers in (False, True))
    plain, stored = (run_turns(run_trace, CASES[case][2], config, 2)[0] for config in configs)
    assert plain is not None and stored is not None
    assert [line for line in differences(plain, stored, 0.0) if "gradient norm" not in line] == []


def step_of(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Return what a rank holds of each flat buffer, and what its second step sends over the data axis."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    recorder = Recorder(connect(spec))
    state = build_state(spec, recorder, CPU)
    for _ in range(2):
        recorder.calls.clear()
        advance(state)
    sent = [call for call in recorder.calls if call.axes == ("data",)]
    check_replicas(state)
    flats = state.buffers.flat_buffers
    narrow = {name for flat in flats if flat.fp8 is not None for name in flat.spans}
    assert {name for name, param in state.model.named_parameters() if param.dtype.itemsize == 1} == narrow
    return {
        "paths": narrow,
        "elements": [(flat.numel, flat.fp8 is not None) for flat in flats],
        "held": [flat.nbytes["weights"] - flat.main.nbytes * (not flat.is_view) for flat in flats],
        "blocks": [0 if flat.fp8 is None else flat.fp8.all_largest.numel() for flat in flats],
        "sent": sent,
    }


def advance(state: TrainState) -> float:
    """Train a step; return its loss."""
    train, mesh, arch = state.spec.config.train, state.model.comm.mesh, state.spec.arch
    samples, batch = RandomSamples(train.seed, arch.vocab_size, arch.seq_length), train.global_batch_size
    loader = BatchLoader(samples, mesh, state.spec.mode.batch_axes, train.micro_batch_size, batch, CPU)
    settings = StepSettings(train.seed, batch * arch.seq_length, batch)
    return float(train_step(state, loader.step(state.consumed_samples), 1e-2, settings).loss)


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_a_byte_and_are_sent_as_one(stage: int) -> None:
    """Held between steps and all-gathered: a byte per weight, and 8 bytes per block, of which 4 are all-reduced."""
    for found in run_turns(step_of, 2, fp8_config(f"untied, ZeRO {stage}", "blockwise", True, precision="bf16")):
        assert "layers.0.attention.qkv.weight" in found["paths"] and "embedding.weight" not in found["paths"]
        sharded = 2 if stage == 3 else 1
        for (numel, is_fp8), held, blocks in zip(found["elements"], found["held"], found["blocks"], strict=True):
            assert held == (numel // sharded + 8 * blocks if is_fp8 else 2 * numel * (stage < 3))
        assert sum(found["blocks"]) * BLOCK**2 == sum(numel for numel, is_fp8 in found["elements"] if is_fp8)
        weights = [numel / 2 for numel, is_fp8 in found["elements"] if is_fp8]
        gathers = [call.wire_bytes for call in found["sent"] if call.collective == "all_gather"]
        passes = {0: 0, 3: 2 * NUM_MICROBATCHES}.get(stage, 1)
        assert sum(each for each in gathers if each in weights) == sum(weights) * passes
        grads = sum(numel * 4 for numel, _ in found["elements"])
        reduced = sum(call.wire_bytes for call in found["sent"] if call.collective == "all_reduce")
        others = reduced - (4 * sum(found["blocks"]) if stage else grads)
        assert 0 < others < 100, "loss, norm and the stop flag"


KERNEL = replace(KERNELS["cpu"], num_received=0)  # as the process group of a dry run
# Case and precision, all in bf16 and every third in another one, with the recipes in turns.
PREDICTED = [(name, "bf16") for name in CASES]
PREDICTED += [(name, precision) for first, precision in ((1, "fp32"), (2, "fp16")) for name, _ in PREDICTED[first::3]]
IN_TURNS = [(*each, recipe) for each, recipe in zip(PREDICTED, cycle(["blockwise", "tensorwise"]), strict=False)]
# Names of the peaks behind the last backward.
UPDATE = ("reduction of gradients", "update", "quantization of weights")


@pytest.mark.parametrize(("case", "precision", "recipe"), IN_TURNS)
def test_a_dry_run_has_the_predicted_traffic_and_memory(case: str, precision: str, recipe: str) -> None:
    """Calls, bytes sent and bytes held are exact; of a shard that cuts weights, all counts as quantized at once."""
    num_ranks = CASES[case][2]
    spec = RunSpec(fp8_config(case, recipe, True, precision=precision), num_ranks, VOCAB_SIZE, num_ranks - 1)
    run, step = run_rank(with_few_microbatches(spec)), make_step_spec(spec, KERNEL)
    dry, expected, memory = step_totals(run, lower(spec.schedule)[run.coord]), step_traffic(step), rank_memory(step)
    assert dry.calls == expected.calls
    assert dry.sent == pytest.approx(expected.sent)
    assert dry.flops == step_flops(step)
    held = memory.weights + memory.main_weights, memory.gradients, memory.optimizer
    assert held == (
        run.between["weights"] + run.between["main weights"],
        run.between["gradients"],
        run.between["optimizer"],
    )
    assert memory.total == pytest.approx(dry.peak, rel=0.02)
    peaks = memory.transient_peaks
    at_update = memory.total - max(peaks.values()) + max(map(peaks.__getitem__, UPDATE))
    assert at_update == pytest.approx(dry.peaks[-1], rel=0.04)


def test_peaks_of_whole_weights_are_predicted() -> None:
    """That of backward has W^T, a copy; behind the update, quantization needs more than the update of a piece."""
    spec = RunSpec(fp8_config("ZeRO 0", "tensorwise", True, precision="bf16"), 2, VOCAB_SIZE)
    run, memory = run_rank(spec), rank_memory(make_step_spec(spec, KERNEL))
    peaks, dry = memory.transient_peaks, step_totals(run, lower(spec.schedule)[run.coord])
    assert peaks["quantization of weights"] > max(peaks["update"], peaks["reduction of gradients"])
    at_update = memory.total - max(peaks.values()) + peaks["quantization of weights"]
    assert at_update == pytest.approx(dry.peaks[-1], rel=0.002)
    assert memory.total == pytest.approx(dry.peak, rel=0.002)


NUM_MICROBATCHES = 2
IDENTITY = {"tokenizer": "a", "corpus": "b", "data.split": "1,0,0", "train.seed": 1234}


def saved(rank: int, world_size: int, config: Config, root: Path) -> list[float]:
    """Return the losses of two steps; save after the first."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state = build_state(spec, connect(spec), CPU)
    losses = [advance(state)]
    save_state(root, state, IDENTITY)
    return [*losses, advance(state)]


def resumed(rank: int, world_size: int, config: Config, folder: Path) -> float:
    """Return the loss of the step after a checkpoint."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state = build_state(spec, connect(spec), CPU, initializes=False)
    load_state(folder, state, IDENTITY)
    return advance(state)


@pytest.mark.parametrize(("source", "target"), [("ZeRO 3", "ZeRO 0"), ("ZeRO 1", "ZeRO 3"), ("tensor", "ZeRO 2")])
def test_checkpoints_have_master_weights(source: str, target: str, tmp_path: Path) -> None:
    """A run with the key continues one without, and the other way, in another layout."""
    for gathers in (True, False):
        root = tmp_path / str(gathers)
        losses = run_turns(saved, CASES[source][2], fp8_config(source, "tensorwise", gathers), root)[0]
        got = run_turns(
            resumed, CASES[target][2], fp8_config(target, "tensorwise", not gathers), root / "iter_0000001"
        )[0]
        assert got == pytest.approx(losses[1], rel=1e-10)
