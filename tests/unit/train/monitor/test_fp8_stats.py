"""Fact: what fp8 loses of the operands of linears is the same in every layout, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.errors import ExitCode
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.metrics.journal import read_journal
from megatron3d.model.linear_spec import linears_of_model
from megatron3d.train.monitor.fp8_stats import OPERANDS, Fp8Statistics, StepFp8Statistics, Table
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.equality import LATENT_MODELS, MODELS, RECOMPUTATIONS, VOCAB_SIZE, configure
from tests.support.fp8_rows import small_recipes
from tests.support.tiny_run import in_run, run, steps, stored, write_config
from tests.support.turn_ranks import connect, make_comm, run_turns
from tests.unit.linear.test_fp8 import ONE, gemm_of

CPU, BLOCK = torch.device("cpu"), 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in small_recipes(BLOCK).items():
        monkeypatch.setitem(RECIPES, name, recipe)


def counted(recipe: str, formats: str, name: str, *tensors: Tensor) -> Mapping[str, float | None]:
    """Return the statistics of the operands that a recipe makes of tensors."""
    statistics, gemm = Fp8Statistics(["a"], CPU), gemm_of(recipe, formats)
    gemm.watch(partial(statistics.add, "a"))
    quantize: Mapping[str, Callable[[Tensor], object]] = {
        "X": gemm.x,
        "W": gemm.w,
        "dY": lambda t: gemm.gathered(gemm.dy(t)),
    }
    for t in tensors:
        quantize[name](t)
    return statistics.reduce(make_comm(ONE, []))["a"][name]


# A block with scale 1: 448 and what rounds to it, 0, half of the least number, which is rounded to 0, and a bit more.
ROW = [448.0, -440.0, 430.0, 0.0, 2.0**-10, 1.01 * 2.0**-10, -(2.0**-12), 1.0]


@pytest.mark.parametrize("name", OPERANDS)
def test_known_elements_are_counted(name: str) -> None:
    """All share a scale: of nine elements that are not 0 two are stored as 448, and two are lost."""
    t = torch.tensor([ROW, [0.0] * 6 + [2.0, 4.0]])
    found = counted("tensorwise", "e4m3", name, t)
    assert found == {"saturated": 2 / 9, "underflowed": 2 / 9, "smallest_scale": 1.0, "largest_scale": 1.0}
    assert counted("tensorwise", "e4m3", name, t, t) == found
    halves = counted("tensorwise", "e4m3", name, t, t / 2)
    assert halves == {**found, "smallest_scale": 0.5}


def test_formats_have_their_own_largest_number() -> None:
    t = torch.tensor([[57344.0, 50000.0, 2.0**-18, 1.0]])
    found = counted("tensorwise", "hybrid", "dY", t)
    assert found == {"saturated": 1 / 4, "underflowed": 1 / 4, "smallest_scale": 1.0, "largest_scale": 1.0}


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.has_powers])
def test_blocks_without_values_have_no_scale(recipe: str) -> None:
    """Nor have those that overflow."""
    rows = [[448.0, 1.0, 1.0, 1.0], [0.0] * 4, [math.inf, 1.0, 1.0, 1.0], [7.0, 1.0, 1.0, 1.0]]
    found = counted(recipe, "e4m3", "X", torch.tensor(rows))
    assert (found["smallest_scale"], found["largest_scale"]) == (2.0**-6, 1.0)
    nothing = counted(recipe, "e4m3", "X", torch.zeros(4, 4))
    assert nothing == {"saturated": 0.0, "underflowed": 0.0, "smallest_scale": None, "largest_scale": None}


DENSE = {
    **MODELS["fewer key/value heads than ranks, QK-norm, tied"],
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "seq_length": 16,
    "hidden_dropout": 0.1,
    "softmax_type": "learnable",  # else the gradient of the first query is rounding, which differs by layout
}
LATENT = {
    **LATENT_MODELS["latent attention, experts, two modules ahead"],
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
}
CAPACITY = {**LATENT, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
FULL = RECOMPUTATIONS["every two layers"]
# Model, keys of the layout, further keys of training, and the number of ranks.
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "replicated tokens": (DENSE, {"tensor_model_parallel_size": 4}, {}, 4),
    "sequence parallelism": (DENSE, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, FULL, 4),
    "2-D, data": (DENSE, {"tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 2)}, {}, 8),
    "3-D": (DENSE, {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8}, {}, 8),
    "pipeline": (DENSE, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_stage": 1}, FULL, 4),
    "ZeRO 3, replicas": (DENSE, {"zero_stage": 3, "num_distributed_optimizer_instances": 2}, {}, 4),
    "context": (DENSE, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}, {}, 4),
    "latent attention, experts": (LATENT, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, {}, 4),
    "experts with a capacity, on two ranks each": (CAPACITY, {"expert_model_parallel_size": 2}, FULL, 4),
    "experts that are divided, some without rows": (
        {**LATENT, "num_moe_experts": 48, "moe_router_topk": 1, "mtp_num_layers": 0},
        {"expert_tensor_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        {},
        4,
    ),
}


def watched(rank: int, world_size: int, config: Config) -> tuple[Table, float]:
    """Return the statistics and the loss of a step, of weights and gradients some of which are lost."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state, train = build_state(spec, connect(spec), CPU), config.train
    samples = RandomSamples(train.seed, VOCAB_SIZE, spec.arch.seq_length)
    sizes = train.micro_batch_size, train.global_batch_size
    batches = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, CPU).step(0)
    statistics = StepFp8Statistics(state, CPU)
    settings = StepSettings(train.seed, spec.arch.seq_length * train.global_batch_size, train.global_batch_size)
    result = train_step(state, batches, 1e-3, settings)
    return statistics.finish(result), result.loss.item()


def with_fp8(model: Mapping[str, Any], parallel: Mapping[str, Any], recipe: str, **train: Any) -> Config:
    sizes = {"micro_batch_size": 8 if "tensor_parallel_mode" in parallel else 4, "global_batch_size": 16}
    return configure(model, parallel, **sizes, fp8="hybrid", fp8_recipe=recipe, **train)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_counts_the_elements_of_one_process(layout: str, recipe: str) -> None:
    """Scales of tensorwise and rowwise are those of a microbatch, which is the same in one process."""
    model, parallel, train, num_ranks = LAYOUTS[layout]
    config = with_fp8(model, parallel, recipe, **train)
    assert check(config, num_ranks, VOCAB_SIZE) == []
    micro = config.train.micro_batch_size
    alone = configure(model, {}, micro_batch_size=micro, global_batch_size=16, fp8="hybrid", fp8_recipe=recipe)
    ((expected, loss),) = run_turns(watched, 1, alone)
    for table, got in run_turns(watched, num_ranks, config):
        assert table == expected and got == pytest.approx(loss, rel=1e-10)
    paths = list(linears_of_model(RunSpec(alone).arch))
    assert list(expected) == paths and all(tuple(each) == OPERANDS for each in expected.values())
    shares = [share for each in expected.values() for row in each.values() for share in list(row.values())[:2]]
    assert sum(share > 0 for share in shares if share is not None) > len(paths)


TRAIN = ["train.fp8=e4m3", "train.fp8_recipe=rowwise", "train.train_iters=4", "optimizer.lr_warmup_iters=0"]


def test_a_run_writes_a_row_per_interval_and_trains_alike(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "watched"
    assert run(config, *TRAIN, *in_run(f"{tmp_path}/plain")).code == ExitCode.DONE
    assert run(config, *TRAIN, "logging.fp8_stats_interval=2", *in_run(str(folder))).code == ExitCode.DONE
    rows = [row for row in read_journal(folder / "metrics.jsonl") if "fp8" in row]
    assert [row["iteration"] for row in rows] == [2, 4] and rows[0]["fp8"] != rows[1]["fp8"]
    assert len(rows[0]["fp8"]) == 8 and rows[0]["fp8"]["layers.1.mlp.fc2"].keys() == set(OPERANDS)
    assert steps(folder) == steps(tmp_path / "plain")
    plain, mine = stored(tmp_path / "plain", 4), stored(folder, 4)
    assert all(torch.equal(mine[name], tensor) for name, tensor in plain.items())


STORED = ("2-D, data", "pipeline", "ZeRO 3, replicas", "latent attention, experts")


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.w.is_square])
@pytest.mark.parametrize("layout", STORED)
def test_weights_that_are_stored_in_fp8_have_the_same_statistics(layout: str, recipe: str) -> None:
    """Their shards are counted where they are updated, whose cuts run through blocks."""
    model, parallel, train, num_ranks = LAYOUTS[layout]
    plain, stored = (with_fp8(model, parallel, recipe, **train, fp8_param_gather=stores) for stores in (False, True))
    assert check(stored, num_ranks, VOCAB_SIZE) == []
    expected, _ = run_turns(watched, num_ranks, plain)[0]
    assert run_turns(watched, num_ranks, stored)[0][0] == expected
