"""Fact: Muon is its authors' formula on every logical matrix, in any layout, with what each rank sends known before.

The formula is that of Jordan et al. 2024 in float64; torch.optim.Muon computes it in bf16.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.store import read_index
from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import CheckpointConfig, Config, OptimizerConfig
from megatron3d.errors import UserError
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.model.param_spec import param_specs
from megatron3d.optim.muon import SCALES, newton_schulz, scale_of
from megatron3d.optim.rule_spec import RULES, is_hidden_matrix, newton_schulz_flops
from megatron3d.parallel.home_plan import HomeMatrix, plan_homes, slab
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.checkpointing import LoadOptions, describe, load_state, new_state, source_of
from megatron3d.train.state import build_state
from tests.support import matrix_rules
from tests.support.matrix_rules import (
    LAYOUTS,
    MEMORY_LAYOUTS,
    MODEL,
    VOCAB_SIZE,
    build,
    check_memory,
    initial_matrices,
    parts_of,
    random_gradient,
    train_and_save,
    train_with_random_gradients,
)
from tests.support.tiny_run import stored
from tests.support.turn_ranks import connect, run_turns

NUM_RANKS = 4


def configure(layout: str, precision: str = "fp64", **optimizer: Any) -> Config:
    return matrix_rules.configure(layout, precision, **{"optimizer": "muon", **optimizer})


def authors_step(w: Tensor, g: Tensor, m: Tensor, lr: float, decay: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return weights and momentum after the authors' step, with the scale of Moonlight (arXiv:2502.16982)."""
    m = 0.95 * m + 0.05 * g
    x = 0.95 * m + 0.05 * g if nesterov else m
    x = x.T if len(x) > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if len(w) > w.shape[1] else x
    return w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape)) * x, m


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_are_the_authors_on_whole_matrices(layout: str, nesterov: bool) -> None:
    """Catches orthogonalized shards, fused q, k and v, and a wrong order of momentum, decay and scale."""
    check_two_steps(configure(layout, muon_use_nesterov=nesterov, weight_decay=0.3), 1 if layout == "one rank" else 4)


@pytest.mark.parametrize("most", [1, 2000])
@pytest.mark.parametrize(
    ("layout", "num_ranks"), [*((name, 4) for name in LAYOUTS if name != "one rank"), ("ZeRO 0", 3)]
)
def test_a_matrix_that_is_divided_is_orthogonalized_as_a_whole(layout: str, num_ranks: int, most: int) -> None:
    """Three ranks have slabs of unequal sizes; 2000 divides the matrices of the MLP alone."""
    check_two_steps(configure(layout, weight_decay=0.3, muon_max_home_elements=most), num_ranks)


def check_two_steps(config: Config, num_ranks: int) -> None:
    """Compare two steps of each matrix with the authors'."""
    nesterov = config.optimizer.muon_use_nesterov
    initial = initial_matrices(config)
    for got in run_turns(train_with_random_gradients, num_ranks, config):
        assert len(got) == 2 * 6
        for name, matrix in got.items():
            w, m = initial[name], torch.zeros_like(initial[name])
            for seed in (1, 2):
                g = random_gradient(seed, name, matrix.shape)
                w, m = authors_step(w, g, m, 0.1, 0.3, nesterov)
            torch.testing.assert_close(matrix, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 8), (16, 16)])
def test_the_direction_is_that_of_torch_muon_up_to_bf16(shape: tuple[int, int]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = g.clone()
    torch.optim.Muon([param], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    config = OptimizerConfig(optimizer="muon")
    mine = newton_schulz(g[None], config.muon_num_ns_steps)[0] * scale_of(shape, config)
    assert (mine + param.detach()).norm() < 0.05 * mine.norm()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_the_direction_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    singular = torch.linalg.svdvals(newton_schulz(torch.randn((3, *shape), dtype=torch.float64), 5))
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert not newton_schulz(torch.zeros(1, *shape), 5).any()


def test_the_scales_are_those_of_megatron() -> None:
    assert {mode: scale(8, 2) for mode, scale in SCALES.items()} == {
        "spectral": math.sqrt(8),
        "shape_scaling": 2.0,
        "unit_rms_norm": 2.0,
    }
    assert (SCALES["shape_scaling"](2, 8), SCALES["unit_rms_norm"](2, 8)) == (1.0, 0.5)


def test_bf16_orthogonalizes_in_bf16() -> None:
    """It differs from fp32 by about the rounding of bf16, and less than another direction would."""
    configs = (configure("ZeRO 0", "fp32", muon_dtype=dtype) for dtype in ("fp32", "bf16"))
    wide, narrow = (run_turns(train_with_random_gradients, 2, config)[0] for config in configs)
    for name, matrix in wide.items():
        assert 1e-4 < (matrix - narrow[name]).norm() / matrix.norm() < 0.05, name


def test_the_configuration_knows_which_rules_need_matrices() -> None:
    """It creates their process group, and imports no rule."""
    assert {name for name in RULES if OptimizerConfig(optimizer=name).needs_matrices} == {"muon", "soap"}
    assert {name for name, rule in RULES.items() if rule.needs_matrices} == {"muon", "soap"}


def test_matrices_are_divided_by_their_work() -> None:
    """Longest first: no home has more to do than the mean and the longest together."""
    shapes = [(64, 64)] * 8 + [(256, 64)] * 4 + [(64, 256)] * 4
    specs = {
        f"layers.{n}.w.weight": ParamSpec((Part(f"{n}", shape, shape),), ((), ()), ()) for n, shape in enumerate(shapes)
    }
    work_of = partial(newton_schulz_flops, config=OptimizerConfig())
    (found,) = plan_homes([specs], Mesh((("pipeline", 2), ("replica", 1), ("data", 3), ("t", 1))), work_of)
    work = [0.0, 0.0, 0.0]
    for each in found.matrices:
        work[each.home] += work_of(each.part.shape)
    assert len(found.matrices) == 16 and max(work) < 1.1 * sum(work) / 3


def test_experts_stay_on_ranks_that_hold_them() -> None:
    parts = tuple(Part(f"experts.{n}", (8, 8), (8, 8)) for n in range(8))
    spec = ParamSpec(parts, ((), ()), (), part_axes=("data",))
    large = ParamSpec((Part("qkv", (16, 16), (16, 16)),), ((), ()), ())
    params = {"layers.0.attention.qkv.weight": large, "layers.0.mlp.experts.fc1.weight": spec}
    (found,) = plan_homes([params], Mesh((("data", 4), ("t", 2))), math.prod)

    def is_near(each: HomeMatrix) -> bool:
        return each.home // 2 == int(each.part.name.rpartition(".")[2]) // 2

    assert found.matrices[0].home == 0 and all(map(is_near, found.matrices[1:]))
    assert len({each.home for each in found.matrices}) == 8


GROUPS: list[dict[str, Any]] = [
    {"params": "*.fc2.*", "optimizer": "adam"},
    {"params": ["*.up.*", "*.proj.*"], "lr_mult": 0.5},
]


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "precision", "groups", "most"),
    [
        *((*layout, precision, [], 2**28) for layout in MEMORY_LAYOUTS for precision in ("fp32", "bf16")),
        *((*layout, "fp32", GROUPS, 2**28) for layout in MEMORY_LAYOUTS[:2]),
        *((*layout, "fp32", [], 2**17) for layout in MEMORY_LAYOUTS[1:3]),
    ],
    ids=str,
)
def test_the_memory_of_an_update_is_predicted(
    num_ranks: int, parallel: dict[str, Any], precision: str, groups: list[dict[str, Any]], most: int
) -> None:
    """Few tokens, so that the update has the peak: directions, matrices on their way, and their products at home."""
    optimizer = {"optimizer": "muon", "muon_dtype": precision, "param_groups": groups, "muon_max_home_elements": most}
    check_memory(num_ranks, parallel, precision, optimizer)


def sent_bytes(rank: int, world_size: int, config: Config, collective: str = "all_to_all") -> list[float]:
    """Return the bytes that a rank sends in each all-to-all, or other collective, of an update."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    recorder = Recorder(connect(spec))
    state = build_state(spec, recorder, torch.device("cpu"))
    state.buffers.settle()
    recorder.calls.clear()
    state.optimizer.step(torch.tensor(1.0), 0.1)
    return [call.wire_bytes for call in recorder.calls if call.collective == collective]


@pytest.mark.parametrize(
    ("parallel", "there", "back"),
    [({"tensor_model_parallel_size": 4}, 0.75, 0.75), ({}, 0.0, 3.0), ({"zero_stage": 1}, 0.75, 0.75)],
    ids=["TP 4", "data 4", "ZeRO 1"],
)
def test_what_an_update_sends(parallel: dict[str, Any], there: float, back: float) -> None:
    """All ranks together send a matrix once, less what its home has, and back to all others that hold it."""
    train = {"micro_batch_size": 2, "global_batch_size": 8}
    sections = {"model": MODEL, "parallel": parallel, "train": train, "optimizer": {"optimizer": "muon"}}
    config = Config.model_validate(sections)
    sent = run_turns(sent_bytes, 4, config)
    specs = build(0, 1, configure("one rank")).buffers.specs
    matrices = [spec.parts for name, spec in specs.items() if is_hidden_matrix(name, spec)]
    numel = sum(math.prod(part.shape) for parts in matrices for part in parts)
    totals = [sum(each) / (4 * numel) for each in zip(*sent, strict=True)]
    if parallel.get(
        "zero_stage"
    ):  # a shard is a range of the flat buffer, of which a home has none, a part or all of a matrix
        assert len(totals) == 2 and 0 < totals[0] == totals[1] < 1
    else:
        assert totals == [there, back]


def test_what_divided_matrices_sum() -> None:
    """Each iteration sums a Gram matrix of the smaller side, on 4 ranks as a ring; and their norms, once."""
    train = {"micro_batch_size": 2, "global_batch_size": 8}
    optimizer = {"optimizer": "muon", "muon_max_home_elements": 2000}
    config = Config.model_validate({"model": MODEL, "train": train, "optimizer": optimizer})
    for sent in run_turns(sent_bytes, 4, config, "all_reduce"):
        numel = 4 * (5 * 32 * 32 + 1)  # both matrices of the MLP of a layer have one side of 32
        assert sum(sent) == 2 * 0.75 * 4 * numel


def test_slabs_cover_a_matrix_once() -> None:
    for shape in ((7, 3), (3, 7), (4, 4), (4, 1)):
        part, held = Part("w", shape, shape), torch.zeros(shape)
        for index in range(3):
            held[tuple(slice(*edges) for edges in slab(part, index, 3))] += 1
        assert held.eq(1).all()


@pytest.mark.parametrize(("source", "target"), [("ZeRO 1", "2-D"), ("2-D", "ZeRO 2, HSDP")])
def test_a_run_continues_in_another_layout(source: str, target: str, tmp_path: Path) -> None:
    """In its own layout bit for bit; every matrix has a momentum, every other parameter AdamW's moments."""
    run_turns(train_and_save, 4, configure(source), None, tmp_path / "whole", 2)
    run_turns(train_and_save, 4, configure(source), None, tmp_path / "half", 1)
    half = tmp_path / "half/iter_0000001"
    for layout in (source, target):
        run_turns(train_and_save, 4, configure(layout), half, tmp_path / layout, 1)
    whole, same, other = (stored(tmp_path / name, 2) for name in ("whole", source, target))
    parts, matrices = parts_of(whole, "model"), parts_of(whole, "optimizer.momentum")
    assert parts_of(whole, "optimizer.exp_avg") == parts_of(whole, "optimizer.exp_avg_sq") == parts - matrices
    assert len(matrices) == 2 * 6 and all(whole[f"optimizer.momentum.{name}"].any() for name in matrices)
    for name, values in whole.items():
        assert torch.equal(values, same[name]), name
        torch.testing.assert_close(other[name], values, rtol=1e-10, atol=1e-10)


def test_a_missing_momentum_is_an_error(tmp_path: Path) -> None:
    config, lost = configure("one rank"), "optimizer.momentum.layers.1.mlp.fc2.weight"
    state = build(0, 1, config)
    pieces = [piece for piece in source_of(state)(lambda tensor: tensor) if piece.name != lost]
    folder = store.save(tmp_path, 0, pieces, describe(state, {}, config), state.model.comm)
    with pytest.raises(UserError, match=re.escape(lost)):
        load_state(folder, state, {})


def test_another_rule_begins_with_new_state_only_where_asked(tmp_path: Path) -> None:
    """What both rules have goes on: AdamW's moments of all that Muon leaves to it."""
    run_turns(train_and_save, 1, configure("one rank", optimizer="adam"), None, tmp_path / "adam", 1)
    folder, config = tmp_path / "adam/iter_0000001", configure("one rank")
    with pytest.raises(
        UserError, match=r"optimizer\.optimizer=adam, but this run has muon.*accept_changed=\[optimizer\]"
    ):
        run_turns(train_and_save, 1, config, folder, tmp_path / "muon", 1)
    accepted = config.model_copy(update={"checkpoint": CheckpointConfig(accept_changed=("optimizer",))})
    run_turns(train_and_save, 1, accepted, folder, tmp_path / "muon", 0)
    before, after = stored(tmp_path / "adam", 1), stored(tmp_path / "muon", 1)
    momenta = {name for name in after if name.startswith("optimizer.momentum.")}
    assert len(momenta) == 2 * 6 and not any(after[name].any() for name in momenta)
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - momenta)
    state = build(0, 1, config)
    (line,) = new_state(folder, read_index(folder), state)
    assert line == f"optimizer.momentum: 0 at first for all its tensors, which {folder} has not"


def test_other_rules_of_groups_need_consent_and_other_factors_do_not(tmp_path: Path) -> None:
    run_turns(train_and_save, 1, configure("one rank"), None, tmp_path, 1)
    folder = tmp_path / "iter_0000001"
    factors, adam = ({"params": "*.fc2.*", **keys} for keys in ({"lr_mult": 0.5}, {"optimizer": "adam"}))
    load_state(folder, build(0, 1, configure("one rank", param_groups=[factors])), {})
    state = build(0, 1, configure("one rank", param_groups=[adam]))
    with pytest.raises(UserError, match=r"saved with optimizer\.param_groups=\[\], but this run has \[{params"):
        load_state(folder, state, {})
    load_state(folder, state, {}, LoadOptions(accept=frozenset(["optimizer"])))
    new = list(new_state(folder, read_index(folder), state))
    assert len(new) == 2 and all("0 at first for 2 of" in line for line in new)


@pytest.mark.parametrize("rule", ["adam", "lion", "muon", "soap"])
def test_a_skipped_update_changes_nothing(rule: str) -> None:
    state = build(0, 1, configure("one rank", "fp32", optimizer=rule))
    for norm, poison in ((1.0, 0.0), (math.nan, math.inf)):
        for number, (_, _, grad) in enumerate(state.buffers.shards("grad")):
            grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(number))).add_(poison)
        held = [*(values for _, _, values in state.buffers.shards("main")), *state.optimizer.state_values]
        before = [values.clone() for values in held]
        skipped = state.optimizer.step(torch.tensor(norm), 0.1)
        assert skipped == math.isnan(norm)
        assert all(torch.equal(a, b) == bool(skipped) for a, b in zip(before, held, strict=True))


def test_what_lies_between_hidden_features_is_a_matrix() -> None:
    model = {
        **MODEL,
        "family": "llama",
        "num_moe_experts": 2,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 8,
    }
    config = Config.model_validate({"model": model})
    specs = RunSpec(config, 1, VOCAB_SIZE)
    taken = {path for path, spec in param_specs(specs.arch, specs.mode).items() if is_hidden_matrix(path, spec)}
    assert {path.removeprefix("layers.0.") for path in taken if path.startswith("layers.0.")} == {
        "attention.qkv.weight",
        "attention.proj.weight",
        "mlp.experts.fc1.weight",
        "mlp.experts.fc2.weight",
        "mlp.shared_experts.fc1.weight",
        "mlp.shared_experts.fc2.weight",
    }
    assert all(path.startswith("layers.") for path in taken)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_the_time_of_an_update_is_predicted(layout: str) -> None:
    """It grows with the iterations, which compute on the matrices of the layers."""
    machine, seconds = load_machine("dgx_h200", "bf16", NUM_RANKS), []
    for count in (5, 50):
        config = configure(layout, muon_num_ns_steps=count)
        seconds.append(predict_time(RunSpec(config, NUM_RANKS, VOCAB_SIZE), machine).optimizer_s)
    assert 0 < seconds[0] < seconds[1]
