"""Fact: the loss of linears in precision is that of a run without fp8, in every layout, and training goes on alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.data.loader import BatchLoader
from megatron3d.errors import ExitCode
from megatron3d.linear.fp8_plan import RECIPES
from megatron3d.metrics.journal import read_journal
from megatron3d.model.compile import Compiler
from megatron3d.train.fp8_loss import unquantized_loss
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.equality import LATENT_MODELS, MODELS, RECOMPUTATIONS, VOCAB_SIZE, configure
from tests.support.fp8_rows import small_recipes
from tests.support.tiny_run import in_run, run, steps, stored, write_config
from tests.support.turn_ranks import connect, run_turns
from tests.unit.model.test_compile import as_autograd_differentiates

CPU, BLOCK = torch.device("cpu"), 4
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
DENSE = {
    **MODELS["fewer key/value heads than ranks, QK-norm, tied"],
    **DROPOUT,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "seq_length": 16,
}
EXPERTS = {
    **LATENT_MODELS["latent attention, experts, two modules ahead"],
    **DROPOUT,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
}
BY_BYTES = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
# Model, keys of the layout, number of ranks, and recipe.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "one rank": (DENSE, {}, 1, "mxfp8"),
    "sequence parallelism": (DENSE, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4, "rowwise"),
    "2-D, data": (DENSE, {"tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 2)}, 8, "blockwise"),
    "3-D": (DENSE, {"tensor_parallel_mode": "3d", "tensor_model_parallel_size": 8}, 8, "tensorwise"),
    "pipeline": (
        DENSE,
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_stage": 1},
        4,
        "rowwise",
    ),
    "ZeRO 3": (DENSE, {"zero_stage": 3}, 4, "blockwise"),
    "context": (DENSE, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 4, "tensorwise"),
    "experts": (EXPERTS, {**BY_BYTES, "tensor_model_parallel_size": 2}, 4, "mxfp8"),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in small_recipes(BLOCK).items():
        monkeypatch.setitem(RECIPES, name, recipe)


def with_layout(layout: str, recipe: str | None, parallel: dict[str, Any], **train: Any) -> Config:
    """Return a layout's model with a recipe of fp8, or without fp8, on the ranks of `parallel`."""
    model, asked, *_ = LAYOUTS[layout]
    fp8 = {} if recipe is None else {"fp8": "hybrid", "fp8_recipe": recipe}
    micro = 8 if "tensor_parallel_mode" in asked else 4
    return configure(model, parallel, micro_batch_size=micro, global_batch_size=16, **train, **fp8)


def losses(rank: int, world_size: int, config: Config) -> list[float]:
    """Return of two steps the loss in precision, where linears multiply in fp8, and that of the step."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    state, train = build_state(spec, connect(spec), CPU), config.train
    samples, length = RandomSamples(train.seed, VOCAB_SIZE, spec.arch.seq_length), spec.arch.seq_length
    sizes = train.micro_batch_size, train.global_batch_size
    loader = BatchLoader(samples, spec.mesh, spec.mode.batch_axes, *sizes, CPU)
    settings, found = StepSettings(train.seed, length * train.global_batch_size, train.global_batch_size), []
    for _ in range(2):
        batches = loader.step(state.consumed_samples)
        found += [] if spec.fp8 is None else [unquantized_loss(state, batches, settings).item()]
        found.append(train_step(state, batches, 1e-2, settings).loss.item())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_loss_of_the_same_weights_without_fp8(layout: str) -> None:
    """That of the first step is the loss of a run without fp8; it and the step's are those of one process."""
    _, parallel, num_ranks, recipe = LAYOUTS[layout]
    configs = [with_layout(layout, each, parallel, **RECOMPUTATIONS["first layer"]) for each in (recipe, None)]
    assert check(configs[0], num_ranks, VOCAB_SIZE) == []
    got, wide = (run_turns(losses, num_ranks, each) for each in configs)
    (expected,) = run_turns(losses, 1, with_layout(layout, recipe, {}))
    for mine in got:
        assert mine[0] == pytest.approx(wide[0][0], rel=1e-14) and mine == pytest.approx(expected, rel=1e-10)
    assert all(1e-6 < abs(step - unquantized) < 0.05 for unquantized, step in zip(*[iter(expected)] * 2, strict=True))


TRAIN = ["train.fp8=e4m3", "train.fp8_recipe=rowwise", "train.train_iters=4", "optimizer.lr_warmup_iters=0"]
TRAIN += ["model.hidden_dropout=0.1", "model.attention_dropout=0.1", "train.precision=fp64"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
def test_a_run_reports_it_and_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers report the losses of eager ones."""
    monkeypatch.setattr("megatron3d.train.state.Compiler", partial(Compiler, backend=as_autograd_differentiates))
    config, found = write_config(tmp_path), list[dict[int, dict[str, float]]]()
    for compiles in (False, True):
        asked, names = [*TRAIN, f"train.compile={compiles}"], [f"{tmp_path}/{each}{compiles}" for each in "ab"]
        plain, folder = map(Path, names)
        assert run(config, *asked, *in_run(str(plain))).code == ExitCode.DONE
        outcome = run(config, *asked, "logging.fp8_loss_interval=2", *in_run(str(folder)))
        assert outcome.code == ExitCode.DONE, outcome.err
        rows = [row for row in read_journal(folder / "metrics.jsonl") if "fp8_loss" in row]
        found.append({row["iteration"]: row["fp8_loss"] for row in rows})
        assert list(found[-1]) == [2, 4] and steps(folder) == steps(plain)
        of_steps = {iteration: loss for iteration, loss, _ in steps(folder)}
        for iteration, row in found[-1].items():
            assert row["loss"] == of_steps[iteration] and row["difference"] == row["loss"] - row["unquantized_loss"]
            said = f" fp8 loss at iteration {iteration} | lm loss value: {row['loss']:.6E} | in fp64: "
            assert f"{said}{row['unquantized_loss']:.6E} | difference: {row['difference']:.6E} |" in outcome.out
        before, after = stored(plain, 4), stored(folder, 4)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for iteration, row in found[0].items():
        assert abs(row["difference"]) > 1e-6 and found[1][iteration] == pytest.approx(row, rel=1e-9)
