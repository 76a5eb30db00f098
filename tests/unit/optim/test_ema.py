"""Fact: the moving average of the weights is that of a slow reference, is state like all other, and is what is loaded.

`tests/support/equality.py` keeps one in every row of the covering array, `test_resharding.py` between all layouts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron3d.checkpoint.index import read_averages
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import ExitCode, UserError
from megatron3d.forecast.memory.rank import predict_memory, snapshot_bytes
from megatron3d.forecast.memory.step_spec import make_step_spec
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.metrics.journal import read_journal
from megatron3d.train.checkpointing import WEIGHTS, LoadOptions, load_state
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches, run_rank
from tests.support.checkpoints import save_state
from tests.support.tiny_run import in_run, refuse, run, stored, write_config
from tests.support.turn_ranks import connect, run_turns
from tools import convert_checkpoint, evaluate

VOCAB_SIZE, NUM_RANKS, DECAY = 61, 4, 0.6
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ZeRO 1": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
    "pipeline": {"pipeline_model_parallel_size": 2, "zero_stage": 2},
}


def configure(layout: str = "one rank", precision: str = "fp32", **optimizer: Any) -> Config:
    train = {"micro_batch_size": 2, "global_batch_size": 8, "precision": precision}
    keys = {"ema_decay": DECAY} | optimizer
    return Config.model_validate({"model": MODEL, "parallel": LAYOUTS[layout], "train": train, "optimizer": keys})


def build(config: Config, rank: int = 0, world_size: int = 1) -> TrainState:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return build_state(spec, connect(spec), torch.device("cpu"))


def advance(state: TrainState, num_steps: int = 1) -> None:
    settings = StepSettings(state.spec.config.train.seed, 64, 8)
    for _ in range(num_steps):
        train_step(state, microbatches(state.spec), 0.01, settings)


def held(state: TrainState) -> tuple[Tensor, Tensor]:
    """Return copies of all weights and of their averages."""
    averages = torch.cat([shard.values for shard in state.optimizer.averages])
    return torch.cat([flat.main for flat in state.buffers.flat_buffers]), averages


@pytest.mark.parametrize("rule", ["adam", "lion", "muon"])
def test_the_average_is_that_of_the_reference(rule: str) -> None:
    """The decay grows with the number of updates; a skipped one, which is the third here, changes nothing."""
    state = build(configure(precision="fp64", optimizer=rule))
    weights, expected = held(state)
    assert torch.equal(weights, expected)
    for update in range(1, 20):
        if update == 3:
            before = held(state)
            state.optimizer.step(torch.tensor(math.nan), 0.1)
            assert all(map(torch.equal, before, held(state)))
        advance(state)
        weights, average = held(state)
        decay = min(DECAY, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weights
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=1e-15)
    assert decay == DECAY and not torch.allclose(average, weights, rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_exchanged_for_the_average_and_come_back(layout: str, precision: str) -> None:
    run_turns(exchange, 1 if layout == "one rank" else NUM_RANKS, configure(layout, precision))


def exchange(rank: int, world_size: int, config: Config) -> None:
    state = build(config, rank, world_size)
    advance(state, 2)
    before = held(state)
    with state.optimizer.averaged_weights():
        state.buffers.settle()
        assert all(map(torch.equal, before, reversed(held(state))))
        for flat in state.buffers.flat_buffers if not state.buffers.sharding.params else ():
            assert torch.equal(flat.params[flat.shard], flat.main.to(flat.params.dtype))
    assert all(map(torch.equal, before, held(state)))


def save_and_go_on(rank: int, world_size: int, config: Config, source: Path | None, root: Path) -> None:
    """Save after two steps from scratch, or from a checkpoint at once; and after two more."""
    state = build(config, rank, world_size)
    if source is None:
        advance(state, 2)
    else:
        load_state(source, state, {})
    save_state(root, state, {})
    advance(state, 2)
    save_state(root, state, {})


@pytest.mark.parametrize(("source", "target"), [("ZeRO 1", "pipeline"), ("ZeRO 3", "ZeRO 1"), ("pipeline", "ZeRO 3")])
def test_it_is_stored_by_name_and_loaded_bit_for_bit(source: str, target: str, tmp_path: Path) -> None:
    """Another layout stores the same bits again; the same layout goes on as if it had never stopped."""
    run_turns(save_and_go_on, NUM_RANKS, configure(source), None, tmp_path / "a")
    for layout in (source, target):
        saved = tmp_path / "a/iter_0000002"
        run_turns(save_and_go_on, NUM_RANKS, configure(layout), saved, tmp_path / layout)
    before = stored(tmp_path / "a", 2)
    weights = [name.removeprefix("model.") for name in before if name.startswith("model.")]
    assert {f"optimizer.ema.{name}" for name in weights} <= before.keys()
    assert any(not torch.equal(before[f"optimizer.ema.{name}"], before[f"model.{name}"]) for name in weights)
    for folder, iteration in ((tmp_path / target, 2), (tmp_path / source, 2), (tmp_path / source, 4)):
        expected, found = stored(tmp_path / "a", iteration), stored(folder, iteration)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_that_begins_to_average_must_say_so(tmp_path: Path) -> None:
    """Then the average begins with the loaded weights, as it does where optimizer state is not loaded."""
    before = build(configure(ema_decay=None))
    advance(before, 2)
    folder = save_state(tmp_path, before, {})
    state = build(configure())
    with pytest.raises(UserError, match=r"the moving average .*ema_decay=0.6.*accept_changed=\[optimizer\]"):
        load_state(folder, state, {})
    for options in (LoadOptions(accept=frozenset({"optimizer"})), WEIGHTS):
        state = build(configure())
        load_state(folder, state, {}, options)
        weights, average = held(state)
        assert torch.equal(weights, average) and torch.equal(weights, held_weights(before))
    with pytest.raises(UserError, match=r"has no moving average of the weights, as a run with optimizer.ema_decay has"):
        read_averages(folder)


def held_weights(state: TrainState) -> Tensor:
    return torch.cat([flat.main for flat in state.buffers.flat_buffers])


@pytest.mark.parametrize("layout", ["ZeRO 3", "pipeline"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_and_snapshots_count_it(layout: str, precision: str) -> None:
    for rank in (0, NUM_RANKS - 1):
        with_average, without = (
            RunSpec(configure(layout, precision, ema_decay=decay), NUM_RANKS, VOCAB_SIZE, rank) for decay in (0.9, None)
        )
        found = run_rank(with_average)
        assert found.between["optimizer"] == predict_memory(with_average).optimizer > 0
        assert found.between["optimizer"] * 2 == run_rank(without).between["optimizer"] * 3
        steps = [make_step_spec(each) for each in (with_average, without)]
        assert snapshot_bytes(steps[0]) == pytest.approx(snapshot_bytes(steps[1]) * 4 / 3)
    alone = build(configure(ema_decay=0.9)).optimizer.num_bytes, build(configure(ema_decay=None)).optimizer.num_bytes
    assert alone[0] * 2 == alone[1] * 3


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_the_predicted_update_moves_its_bytes(rule: str) -> None:
    machine = load_machine("dgx_h200", "bf16", NUM_RANKS)
    large = {"model": {**MODEL, "hidden_size": 4096, "num_layers": 8}, "parallel": LAYOUTS["ZeRO 1"]}
    seconds = []
    for decay in (0.9, None):
        config = Config.model_validate({**large, "optimizer": {"optimizer": rule, "ema_decay": decay}})
        seconds.append(predict_time(RunSpec(config, NUM_RANKS, VOCAB_SIZE), machine).optimizer_s)
    assert seconds[0] > 1.2 * seconds[1] if rule == "adam" else seconds[0] > seconds[1]


EVALUATES = ["train.eval_interval=4", "train.eval_iters=1", "train.precision=fp64"]


def validations(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_journal(folder / "metrics.jsonl") if "validation_loss" in row]


def test_a_run_evaluates_stores_and_exports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = write_config(tmp_path), tmp_path / "run"
    ema = [*EVALUATES, "optimizer.ema_decay=0.7"]
    assert run(config, *EVALUATES, *in_run(f"{tmp_path}/plain")).code == ExitCode.DONE
    assert run(config, *ema, *in_run(f"{tmp_path}/quiet"), "train.eval_ema_weights=false").code == ExitCode.DONE
    assert run(config, *ema, "train.exit_interval=5").code == ExitCode.STOPPED
    assert run(config, *ema).code == ExitCode.DONE
    plain, quiet, mine = (stored(tmp_path / name, 8) for name in ("plain", "quiet", "run"))
    assert all(torch.equal(mine[name], tensor) for name, tensor in plain.items())
    assert mine.keys() - plain.keys() == {name for name in mine if name.startswith("optimizer.ema.")}
    assert all(torch.equal(mine[name], tensor) for name, tensor in quiet.items())
    rows = [validations(tmp_path / name) for name in ("plain", "quiet", "run")]
    assert [[row["validation_loss"] for row in each] for each in rows] == 3 * [[r["validation_loss"] for r in rows[0]]]
    assert all("validation_loss_ema" not in row for row in rows[0] + rows[1])
    assert all(abs(row["validation_loss_ema"] / row["validation_loss"] - 1) > 1e-4 for row in rows[2])
    for weights, key in (("model", "validation_loss"), ("ema", "validation_loss_ema")):
        arguments = ["--load", str(folder), "--split", "valid", "--samples", "16", "--json", "--weights", weights]
        assert evaluate.main(arguments) == ExitCode.DONE
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] == pytest.approx(
            rows[2][-1][key], rel=1e-12
        )
        target = ["--load", str(folder), "--output", str(tmp_path / weights), "--weights", weights]
        assert convert_checkpoint.main(["to-hf", *target, "--without-transformers"]) == ExitCode.DONE
    written = {name: load_file(tmp_path / name / "model.safetensors") for name in ("model", "ema")}
    prefixes = {"model": "model.", "ema": "optimizer.ema."}
    for name, tensors in written.items():  # GPT-2's are fused and transposed
        expected = torch.cat([mine[each].flatten() for each in mine if each.startswith(prefixes[name])])
        assert torch.equal(torch.cat([tensor.flatten() for tensor in tensors.values()]).msort(), expected.msort())


def test_values_that_are_no_decay_and_state_that_is_dropped_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for value in ("0", "1", "-0.5"):
        refuse(config, [f"optimizer.ema_decay={value}"], (f"optimizer.ema_decay={value}",))
    assert run(config, "optimizer.ema_decay=0.9", "train.exit_interval=2").code == ExitCode.STOPPED
    outcome = run(config)
    assert outcome.code == ExitCode.USER_ERROR
    assert "saved with optimizer.ema_decay=0.9, but this run keeps no moving average" in outcome.err
    accepted = run(config, "checkpoint.accept_changed=[optimizer]", "train.exit_interval=4")
    assert accepted.code == ExitCode.STOPPED
    again = run(config, "optimizer.ema_decay=0.9")
    assert again.code == ExitCode.USER_ERROR and "accept_changed=[optimizer]" in again.err
    begun = run(config, "optimizer.ema_decay=0.9", "checkpoint.accept_changed=[optimizer]")
    assert begun.code == ExitCode.DONE
    assert "> optimizer.ema: the current weights at first, since " in begun.out


def test_a_checkpoint_without_an_average_cannot_be_evaluated_as_one(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert run(config, "train.train_iters=1").code == ExitCode.DONE
    with pytest.raises(UserError, match="has no moving average of the weights"):
        evaluate.main(["--load", str(tmp_path / "run"), "--weights", "ema"])
