"""Fact: a rule that is declared is stored, resharded, counted and predicted, without a change to what does so.

The rules here are registered by the tests: the sign of the momentum (Bernstein et al. 2018, arXiv:1802.04434) with one
state tensor, and one that divides whole matrices by their spectral norm, on their home ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, OptimizerConfig
from megatron3d.errors import UserError
from megatron3d.forecast.memory.rank import predict_memory
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.model.params import normal_box, part_views
from megatron3d.optim import optimizer as optimizers
from megatron3d.optim import rule_spec
from megatron3d.optim.adamw import ParamGroup, Update
from megatron3d.optim.homes import MatrixExchange, Round
from megatron3d.optim.rule_spec import StateTensor, UpdateRule, is_hidden_matrix
from megatron3d.train.checkpointing import load_state
from megatron3d.train.state import TrainState, build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.dry_run import microbatches, run_rank
from tests.support.checkpoints import save_state
from tests.support.tiny_run import stored
from tests.support.turn_ranks import connect, run_turns

VOCAB_SIZE, NUM_RANKS = 61, 4
SIGN = UpdateRule("sign", (StateTensor("momentum"),), moved_bytes=20, flops=7)
NARROW = replace(SIGN, name="narrow", states=(StateTensor("momentum", "exp_avg_dtype"),))
SPECTRAL = replace(SIGN, name="spectral", takes=is_hidden_matrix, others=SIGN, needs_matrices=True)
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ZeRO 1": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
    "pipeline": {"pipeline_model_parallel_size": 2, "zero_stage": 2},
}


def sign_update(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    for w, g, m in zip(group.mains, group.grads, *group.states, strict=True):
        m.copy_(torch.where(skipped != 0, m, torch.lerp(m.to(g.dtype), g, 1 - config.adam_beta1).to(m.dtype)))
        w.copy_(torch.where(skipped != 0, w, w * (1 - lr * group.weight_decay) - lr * m.sign()))


def spectral_update(exchange: MatrixExchange) -> Update:
    def update(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
        def sources(round_: Round) -> dict[int, Tensor]:
            return {shard: group.grads[shard].clone() for shard in round_.shards}

        def compute(x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            return x / torch.linalg.matrix_norm(x, 2, keepdim=True)

        for shard, result in exchange.map(sources, compute):
            group.mains[shard].sub_(lr * result)

    return update


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the rules, and updates without a choice of kernels."""

    def choose(config: OptimizerConfig, mains: Sequence[Tensor], states: Sequence[Tensor]) -> Update:
        return sign_update

    for rule in (SIGN, NARROW, SPECTRAL):
        monkeypatch.setitem(cast(dict[str, Any], rule_spec.RULES), rule.name, rule)
        monkeypatch.setitem(cast(dict[str, Any], optimizers.UPDATES), rule.name, choose)
    monkeypatch.setitem(cast(dict[str, Any], optimizers.MATRIX_UPDATES), "spectral", spectral_update)
    needing = property(lambda self: rule_spec.RULES[self.optimizer].needs_matrices)
    monkeypatch.setattr(OptimizerConfig, "needs_matrices", needing)


def configure(layout: str, rule: str, **optimizer: Any) -> Config:
    """Return a run with a rule that the schema does not name."""
    train = {"micro_batch_size": 2, "global_batch_size": 8}
    sections = {"model": MODEL, "parallel": LAYOUTS[layout], "train": train, "optimizer": optimizer}
    config = Config.model_validate(sections)
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"optimizer": rule})})


def build(config: Config, rank: int = 0, world_size: int = 1) -> TrainState:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return build_state(spec, connect(spec), torch.device("cpu"))


def advance(state: TrainState) -> None:
    settings = StepSettings(state.spec.config.train.seed, 64, 8)
    for _ in range(2):
        train_step(state, microbatches(state.spec), 0.01, settings)


def train_and_save(rank: int, world_size: int, config: Config, root: Path) -> None:
    """Save after two steps, and after two more."""
    state = build(config, rank, world_size)
    for _ in range(2):
        advance(state)
        save_state(root, state, {})


def save_again(rank: int, world_size: int, config: Config, source: Path, root: Path) -> None:
    """Load a checkpoint, save it, and save it after two more steps."""
    state = build(config, rank, world_size)
    load_state(source, state, {})
    save_state(root, state, {})
    advance(state)
    save_state(root, state, {})


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rule", ["sign", "narrow"])
@pytest.mark.parametrize(("source", "target"), [("ZeRO 1", "pipeline"), ("ZeRO 3", "ZeRO 1"), ("pipeline", "ZeRO 3")])
def test_the_state_is_saved_restored_and_resharded(source: str, target: str, rule: str, tmp_path: Path) -> None:
    """Another layout stores the same bits again; the same layout continues as if it had never stopped."""
    dtype = {"exp_avg_dtype": "bf16"} if rule == "narrow" else {}
    run_turns(train_and_save, NUM_RANKS, configure(source, rule, **dtype), tmp_path / "a")
    for layout in (source, target):
        saved, config = tmp_path / "a/iter_0000002", configure(layout, rule, **dtype)
        run_turns(save_again, NUM_RANKS, config, saved, tmp_path / layout)
    before = stored(tmp_path / "a", 2)
    parts = [name.removeprefix("model.") for name in before if name.startswith("model.")]
    assert before.keys() == {f"{kind}.{part}" for kind in ("model", "optimizer.momentum") for part in parts}
    assert all(before[f"optimizer.momentum.{part}"].any() for part in parts)
    kinds = {tensor.dtype for name, tensor in before.items() if name.startswith("optimizer.")}
    assert kinds == {torch.bfloat16 if rule == "narrow" else torch.float32}
    assert same(stored(tmp_path / target, 2), before)
    assert same(stored(tmp_path / source, 2), before) and same(stored(tmp_path / source, 4), stored(tmp_path / "a", 4))


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    run_turns(train_and_save, 1, configure("one rank", "adam"), tmp_path)
    with pytest.raises(UserError, match=r"for optimizer\.optimizer=sign it holds weights only"):
        load_state(tmp_path / "iter_0000002", build(configure("one rank", "sign")), {})


@pytest.mark.parametrize("layout", ["ZeRO 3", "pipeline"])
@pytest.mark.parametrize(("rule", "itemsize"), [("adam", 8), ("sign", 4), ("narrow", 2)])
def test_the_dry_run_and_the_memory_model_count_the_declared_state(layout: str, rule: str, itemsize: int) -> None:
    dtype = {"exp_avg_dtype": "bf16"} if rule == "narrow" else {}
    for rank in (0, NUM_RANKS - 1):
        spec = RunSpec(configure(layout, rule, **dtype), NUM_RANKS, VOCAB_SIZE, rank)
        between, memory = run_rank(spec).between, predict_memory(spec)
        assert between["optimizer"] == memory.optimizer == memory.gradients // 4 * itemsize > 0


def test_the_start_up_report_counts_the_declared_state() -> None:
    built = {rule: build(configure("one rank", rule)).optimizer.num_bytes for rule in ("sign", "adam")}
    assert built["adam"] == 2 * built["sign"] > 0


def test_the_predicted_update_takes_what_its_bytes_or_its_flops_take(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_machine("dgx_h200", "bf16", NUM_RANKS)

    def update_s(rule: str) -> float:
        return predict_time(RunSpec(configure("ZeRO 1", rule), NUM_RANKS, VOCAB_SIZE), machine).optimizer_s

    for name, cost in (("moves", {"moved_bytes": 1e6}), ("computes", {"flops": 1e9})):
        monkeypatch.setitem(cast(dict[str, Any], rule_spec.RULES), name, replace(SIGN, **cost))
    assert 0 < update_s("sign") < update_s("moves") < update_s("computes")
    assert update_s("sign") < update_s("spectral")


def test_parameters_are_chosen_by_name_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go to another rule, with its own state; weight decay is all that changes weights whose gradient is 0."""
    wide = replace(SIGN, name="wide", states=(StateTensor("wide"),))
    chosen = replace(SIGN, takes=lambda path, spec: path.startswith("embedding."), others=wide)
    for rule in (wide, chosen):
        monkeypatch.setitem(cast(dict[str, Any], rule_spec.RULES), rule.name, rule)
        monkeypatch.setitem(cast(dict[str, Any], optimizers.UPDATES), rule.name, optimizers.UPDATES["sign"])
    state = build(configure("one rank", "sign", weight_decay=0.5))
    for _, _, values in state.buffers.shards("main"):
        values.fill_(1.0)
    state.optimizer.step(torch.tensor(1.0), 0.1)
    decayed = {name for name, _, values in state.buffers.shards("main") if values[0].item() != 1}
    assert decayed == {name for name, spec in state.buffers.specs.items() if spec.decay} != set(state.buffers.specs)
    held = {"momentum": 0, "wide": 0}
    for shard in state.optimizer.state:
        held[shard.name] += len(shard.values)
    sizes = {name: len(values) for name, _, values in state.buffers.shards("main")}
    assert held["momentum"] == sum(size for name, size in sizes.items() if name.startswith("embedding."))
    assert sum(held.values()) == sum(flat.numel for flat in state.buffers.flat_buffers)


def spectral_step(rank: int, world_size: int, config: Config) -> dict[str, float]:
    """Return the spectral norm of each matrix after a step from zero, and check that others followed their sign."""
    state = build(config, rank, world_size)
    buffers, mesh = state.buffers, state.model.comm.mesh
    buffers.settle()
    for _, _, values in buffers.shards("main"):
        values.zero_()
    for name, start, values in buffers.shards("grad"):
        for part, box, view in part_views(buffers.specs[name], values, mesh, start):
            view.copy_(normal_box(1, part.name, part.shape, box))
    state.optimizer.step(torch.tensor(1.0), 1.0)
    buffers.settle()
    whole = {}
    for name, spec in buffers.specs.items():
        for part, box, view in part_views(spec, state.model.get_parameter(name), mesh):
            if is_hidden_matrix(name, spec):
                share = torch.zeros(part.shape)
                share[tuple(slice(*edges) for edges in box)] = view / spec.num_copies(mesh, mesh.names)
                whole[part.name] = share
            else:
                assert view.abs().unique().tolist() == [1.0], name
    pending = [(name, state.model.comm.all_reduce(share, mesh.names)) for name, share in whole.items()]
    return {name: torch.linalg.matrix_norm(each.wait(), 2).item() for name, each in pending}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("pipeline", "ZeRO 3")])
def test_a_rule_on_matrices_sees_every_logical_matrix_as_a_whole(layout: str) -> None:
    """Queries, keys and values of one fused parameter are three matrices, each normalized alone, in any layout."""
    num_ranks = 1 if layout == "one rank" else NUM_RANKS
    for norms in run_turns(spectral_step, num_ranks, configure(layout, "spectral", clip_grad=0.0)):
        assert list(norms.values()) == pytest.approx(2 * 6 * [1.0], abs=1e-4)


def test_a_rule_that_knows_nothing_of_clipping_is_given_clipped_gradients() -> None:
    state = build(configure("one rank", "sign", clip_grad=0.5))
    for _, _, values in state.buffers.shards("grad"):
        values.fill_(4.0)
    state.optimizer.step(torch.tensor(2.0), 1.0)
    for _, _, values in state.buffers.shards("grad"):
        torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-5, atol=0)
