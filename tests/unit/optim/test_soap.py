"""Fact: SOAP is its paper's algorithm on every logical matrix, in any layout, with state at the matrix' home alone.

The reference keeps the first moment in the space of the weights and orthogonalizes column after column, in float64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint import store
from megatron3d.checkpoint.store import read_index
from megatron3d.config.resolve import resolve
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import CheckpointConfig, Config, OptimizerConfig
from megatron3d.errors import UserError
from megatron3d.forecast.time.step import load_machine, predict_time
from megatron3d.optim.rule_spec import RULES, soap_flops
from megatron3d.optim.soap import is_refreshed, refresh
from megatron3d.train.checkpointing import LoadOptions, describe, load_state, new_state, source_of
from megatron3d.verify.flop_memory_meter import FlopMemoryMeter
from tests.support import matrix_rules
from tests.support.matrix_rules import (
    LAYOUTS,
    MEMORY_LAYOUTS,
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
from tests.support.turn_ranks import run_turns

KINDS = [f"optimizer.{kind.name}" for kind in RULES["soap"].matrix_states]
NUM_MATRICES, NUM_STEPS = 2 * 6, 5
APPLIED = torch.tensor(False)


def configure(layout: str, precision: str = "fp64", **optimizer: Any) -> Config:
    return matrix_rules.configure(layout, precision, **{"optimizer": "soap", **optimizer})


def orthonormal(columns: Tensor) -> Tensor:
    """Return the columns, each without its part along those before it, twice, as rounding needs, and of length 1."""
    found = torch.empty_like(columns)
    for place in range(columns.shape[1]):
        before, x = found[:, :place], columns[:, place]
        x = x - before @ (before.T @ x)
        x = x - before @ (before.T @ x)
        found[:, place] = x / x.norm()
    return found


class Paper:
    """Algorithm 3 of the paper for one matrix, from the identity, with damped Grams."""

    def __init__(self, w: Tensor, config: OptimizerConfig) -> None:
        self.w, self._config, self._step = w, config, 0
        self._m, self._v = torch.zeros_like(w), torch.zeros_like(w)
        self._grams = [w.new_zeros(size, size) for size in w.shape]
        self._bases = [torch.eye(size, dtype=w.dtype) for size in w.shape]

    def step(self, g: Tensor, lr: float) -> None:
        c, (left, right) = self._config, self._bases
        self._step += 1
        self._m = c.adam_beta1 * self._m + (1 - c.adam_beta1) * g
        self._v = c.adam_beta2 * self._v + (1 - c.adam_beta2) * (left.T @ g @ right) ** 2
        m, v = self._m / (1 - c.adam_beta1**self._step), self._v / (1 - c.adam_beta2**self._step)
        n = left @ ((left.T @ m @ right) / (v.sqrt() + c.adam_eps)) @ right.T
        self.w = self.w - lr * (n + c.weight_decay * self.w)
        beta = c.adam_beta2 if c.soap_shampoo_beta is None else c.soap_shampoo_beta
        for dim, product in enumerate((g @ g.T, g.T @ g)):
            self._grams[dim] = beta * self._grams[dim] + (1 - beta) * product
            if len(product) <= c.soap_max_precond_dim and (
                self._step < c.soap_precondition_frequency or self._step % c.soap_precondition_frequency == 0
            ):
                self._follow(dim)

    def _follow(self, dim: int) -> None:
        gram, basis = self._grams[dim], self._bases[dim]
        damping = 1e-2 * gram.trace() / len(gram) + self._config.adam_eps**2 * self._v.shape[1 - dim]
        found = [max(float(column @ gram @ column), float(damping)) for column in basis.T]
        found = torch.tensor(found).bfloat16().tolist()  # those that are equal but for rounding keep their order
        order = torch.tensor(sorted(range(len(found)), key=lambda place: -found[place]))
        self._v = self._v.index_select(dim, order)
        self._bases[dim] = orthonormal(gram @ basis[:, order] + damping * basis[:, order])


@pytest.mark.parametrize(
    "keys",
    [{}, {"soap_precondition_frequency": 2, "soap_shampoo_beta": 0.7}, {"soap_max_precond_dim": 40}],
    ids=["two-sided", "frequent", "one-sided"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_the_papers_on_whole_matrices(layout: str, keys: dict[str, Any]) -> None:
    """Catches Grams of shards, and moments that do not follow the bases; Grams of 128 x 32 have rank 32."""
    config = configure(layout, **{"weight_decay": 0.3, "soap_precondition_frequency": 4, **keys})
    initial = initial_matrices(config)
    got, *others = run_turns(train_with_random_gradients, 1 if layout == "one rank" else 4, config, NUM_STEPS)
    assert len(got) == NUM_MATRICES
    for name, matrix in got.items():
        paper = Paper(initial[name], config.optimizer)
        for seed in range(1, NUM_STEPS + 1):
            paper.step(random_gradient(seed, name, matrix.shape), 0.1)
        for each in (matrix, *(other[name] for other in others)):
            torch.testing.assert_close(each, paper.w, rtol=1e-10, atol=1e-10)


def test_without_bases_it_is_adamw() -> None:
    """Its numbers travel to homes and back and are AdamW's; with bases they are not."""
    adamw, alone, rotated = (
        run_turns(train_with_random_gradients, 4, configure("ZeRO 1", weight_decay=0.3, **keys), NUM_STEPS)[0]
        for keys in ({"optimizer": "adam"}, {"soap_max_precond_dim": 1}, {})
    )
    for name, matrix in adamw.items():
        torch.testing.assert_close(alone[name], matrix, rtol=1e-12, atol=1e-13)
        assert (rotated[name] - matrix).norm() > 0.1 * matrix.norm(), name


def new_states(rows: int, columns: int) -> dict[str, Tensor]:
    """Return the state of one matrix at the start, in float64."""
    found = {}
    for kind in RULES["soap"].matrix_states:
        shape = kind.shape((rows, columns), OptimizerConfig())
        assert shape is not None
        found[kind.name] = torch.eye(*shape).double()[None] if kind.is_identity else torch.zeros(1, *shape).double()
    return found


def gram_of(eigenvalues: Sequence[float], noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return a matrix with these eigenvalues and random eigenvectors, with relative noise, and the eigenvectors."""
    generator = torch.Generator().manual_seed(3)
    vectors = orthonormal(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64))
    factors = 1 + noise * torch.randn(len(eigenvalues), generator=torch.Generator().manual_seed(4)).double()
    gram = vectors @ (torch.tensor(eigenvalues).double() * factors).diag() @ vectors.T
    return gram + noise * torch.randn_like(gram), vectors


@pytest.mark.parametrize(("side", "dim"), [("left", 0), ("right", 1)])
def test_the_bases_become_eigenvectors_and_the_moments_follow(side: str, dim: int) -> None:
    """The first moment stays what it is in the space of the weights; the second one keeps its columns."""
    states = new_states(12, 12)
    gram, vectors = gram_of([1.4**-place for place in range(12)])
    states[f"{side}_gram"][0] = gram
    m = torch.randn(12, 12, dtype=torch.float64)
    states["rotated_exp_avg"][0] = m
    for _ in range(300):
        refresh(states, side, APPLIED, 1e-8)
    basis = states[f"{side}_basis"][0]
    torch.testing.assert_close((basis.T @ vectors).abs(), torch.eye(12).double(), rtol=0, atol=1e-10)
    rotated = states["rotated_exp_avg"][0]
    torch.testing.assert_close(basis @ rotated if dim == 0 else rotated @ basis.T, m, rtol=1e-12, atol=1e-12)
    turned = torch.arange(11, -1, -1)
    states[f"{side}_basis"][0] = basis[:, turned]
    before = torch.rand(12, 12, dtype=torch.float64)
    states["rotated_exp_avg_sq"][0] = before
    refresh(states, side, APPLIED, 1e-8)
    assert torch.equal(states["rotated_exp_avg_sq"][0], before.index_select(dim, turned))


def test_rounding_of_a_gram_of_low_rank_stays_rounding() -> None:
    """At most over the damping; with eigh, or without damping, vectors of the eigenvalue 0 would differ by 1."""
    bases = []
    for noise in (0.0, 1e-16):
        states = new_states(24, 8)
        states["left_gram"][0] = gram_of([1.0] * 4 + [0.1] * 4 + [0.0] * 16, noise)[0]
        for _ in range(5):
            refresh(states, "left", APPLIED, 1e-8)
        bases.append(states["left_basis"])
    assert 0 < (bases[0] - bases[1]).abs().max() < 1e-11


@pytest.mark.parametrize("noise", [0.0, 1e-13, -1e-13])
def test_equal_eigenvalues_keep_their_order_under_rounding(noise: float) -> None:
    """The rounding of another layout, or of another CPU, would swap columns of the basis."""
    states = new_states(6, 4)
    states["left_gram"][0] = torch.diag(torch.tensor([0.3, 0.7, 0.7 + noise, 0.3 + noise, 1.1, 1.1 + noise]).double())
    refresh(states, "left", APPLIED, 1e-8)
    expected = torch.eye(6).double()[:, [4, 5, 1, 2, 0, 3]]
    torch.testing.assert_close(states["left_basis"][0], expected, rtol=0, atol=1e-12)


def test_a_gradient_of_zeros_leaves_the_bases_as_they_are() -> None:
    states = new_states(6, 4)
    refresh(states, "left", APPLIED, 1e-8)
    assert torch.equal(states["left_basis"][0], torch.eye(6).double())


def test_gradients_that_are_0_but_for_rounding_choose_no_basis() -> None:
    """The rounding of another layout would choose another one."""
    states = new_states(6, 4)
    states["left_gram"][0] = 1e-34 * gram_of([1.0, 0.5, 0.2, 0.1, 0.0, 0.0])[0]
    refresh(states, "left", APPLIED, 1e-8)
    torch.testing.assert_close(states["left_basis"][0], torch.eye(6).double(), rtol=0, atol=1e-15)


def test_when_bases_are_refreshed() -> None:
    """After each of the first steps, and then after each that is a multiple of the frequency."""
    config = OptimizerConfig(optimizer="soap", soap_precondition_frequency=4)
    assert [step + 1 for step in range(14) if is_refreshed(step, config)] == [1, 2, 3, 4, 8, 12]


def state_bytes(rank: int, world_size: int, config: Config) -> int:
    optimizer = build(rank, world_size, config).optimizer
    return sum(each.values.nbytes for each in optimizer.home_state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_of_a_matrix_is_on_one_rank(layout: str) -> None:
    """Also without ZeRO; no rank has more than half of it."""
    num_ranks = 1 if layout == "one rank" else 4
    held = run_turns(state_bytes, num_ranks, configure(layout))
    shapes = [(32, 32)] * 8 + [(128, 32)] * 2 + [(32, 128)] * 2
    assert sum(held) == 8 * sum(2 * (m * n + m * m + n * n) for m, n in shapes)
    assert num_ranks == 1 or max(held) < 0.5 * sum(held)


@pytest.mark.parametrize(("source", "target"), [("ZeRO 1", "2-D"), ("2-D", "one rank"), ("one rank", "ZeRO 2, HSDP")])
def test_a_run_continues_in_another_layout(source: str, target: str, tmp_path: Path) -> None:
    """In its own layout bit for bit, between refreshes and at one; a matrix has its own state, all else AdamW's."""
    keys = {"soap_precondition_frequency": 3, "adam_eps": 1e-6}

    def run(layout: str, begin: Path | None, name: str, num_steps: int) -> None:
        config = configure(layout, **keys)
        run_turns(train_and_save, 1 if layout == "one rank" else 4, config, begin, tmp_path / name, num_steps)

    run(source, None, "whole", 6)
    run(source, None, "half", 4)
    for layout in (source, target):
        run(layout, tmp_path / "half/iter_0000004", layout, 2)
    whole, same, other = (stored(tmp_path / name, 6) for name in ("whole", source, target))
    parts = parts_of(whole, "model")
    matrices = parts - parts_of(whole, "optimizer.exp_avg")
    assert len(matrices) == NUM_MATRICES and parts_of(whole, "optimizer.exp_avg_sq") == parts - matrices
    for kind in KINDS:
        assert parts_of(whole, kind) == matrices and all(whole[f"{kind}.{name}"].any() for name in matrices)
    for name, values in whole.items():
        assert torch.equal(values, same[name]), name
        torch.testing.assert_close(other[name], values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_state_is_an_error(kind: str, tmp_path: Path) -> None:
    config, lost = configure("one rank"), f"{kind}.layers.1.mlp.fc2.weight"
    state = build(0, 1, config)
    pieces = [piece for piece in source_of(state)(lambda tensor: tensor) if piece.name != lost]
    folder = store.save(tmp_path, 0, pieces, describe(state, {}, config), state.model.comm)
    with pytest.raises(UserError, match=re.escape(f"tensor {lost} is not in it")):
        load_state(folder, state, {})


def test_damaged_state_is_found(tmp_path: Path) -> None:
    """Its bytes are verified by the home that reads them."""
    config = configure("ZeRO 0")
    run_turns(train_and_save, 4, config, None, tmp_path, 1)
    folder = tmp_path / "iter_0000001"
    name = "optimizer.left_basis.layers.1.mlp.fc2.weight"
    (box,) = read_index(folder).tensors[name].boxes
    content = bytearray((folder / box.file).read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    content[8 + int.from_bytes(content[:8], "little") + header[box.key]["data_offsets"][0]] ^= 1
    (folder / box.file).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(box.key) + " is damaged"):
        run_turns(train_and_save, 2, config, folder, tmp_path / "next", 0)


@pytest.mark.parametrize("other", ["adam", "muon"])
def test_another_rule_begins_with_new_state_only_where_asked(other: str, tmp_path: Path) -> None:
    """What both rules have goes on: AdamW's moments of all that is no matrix."""
    run_turns(train_and_save, 1, configure("one rank", optimizer=other), None, tmp_path / other, 1)
    folder, config = tmp_path / other / "iter_0000001", configure("one rank")
    refusal = rf"optimizer\.optimizer={other}, but this run has soap.*accept_changed=\[optimizer\]"
    with pytest.raises(UserError, match=refusal):
        run_turns(train_and_save, 1, config, folder, tmp_path / "soap", 1)
    accepted = config.model_copy(update={"checkpoint": CheckpointConfig(accept_changed=("optimizer",))})
    run_turns(train_and_save, 1, accepted, folder, tmp_path / "soap", 0)
    before, after = stored(tmp_path / other, 1), stored(tmp_path / "soap", 1)
    new = {name for name in after if name.startswith(tuple(f"{kind}." for kind in KINDS))}
    assert len(new) == len(KINDS) * NUM_MATRICES
    assert all(torch.equal(after[name], before[name]) for name in after.keys() - new)
    for name in new:
        values = after[name]
        assert torch.equal(values, torch.eye(len(values)).to(values) if "basis" in name else torch.zeros_like(values))
    lines = list(new_state(folder, read_index(folder), build(0, 1, config)))
    begin = ["0", "0", "0", "0", "the identity", "the identity"]
    assert lines == [
        f"{kind}: {value} at first for all its tensors, which {folder} has not"
        for kind, value in zip(KINDS, begin, strict=True)
    ]


def test_a_rollback_resets_state_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    """A state that has trained loads a checkpoint of another rule as a new one does."""
    run_turns(train_and_save, 1, configure("one rank", optimizer="adam"), None, tmp_path, 1)
    state = build(0, 1, configure("one rank"))
    for each in state.optimizer.home_state:
        each.values.fill_(7.0)
    load_state(tmp_path / "iter_0000001", state, {}, LoadOptions(accept=frozenset({"optimizer"})))
    assert not any((each.values == 7).any() for each in state.optimizer.home_state)


@pytest.mark.parametrize("layout", ["one rank", "ZeRO 1"])
def test_a_skipped_update_changes_nothing(layout: str) -> None:
    for held, skipped in run_turns(skip_between, 1 if layout == "one rank" else 4, configure(layout)):
        assert skipped and all(torch.equal(a, b) for a, b in held)


def skip_between(rank: int, world_size: int, config: Config) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """Return weights and state before and after a skipped update that would refresh, and whether it was skipped."""
    state = build(rank, world_size, config)
    for iteration, (norm, poison) in enumerate(((1.0, 0.0), (math.inf, math.nan))):
        for number, (_, _, grad) in enumerate(state.buffers.shards("grad")):
            values = torch.randn(grad.shape, generator=torch.Generator().manual_seed(number), dtype=grad.dtype)
            grad.copy_(values).add_(poison)
        held = [*(values for _, _, values in state.buffers.shards("main")), *state.optimizer.state_values]
        before = [values.clone() for values in held]
        skipped = state.optimizer.step(torch.tensor(norm), 0.1, iteration=iteration)
        state.buffers.settle()
    return list(zip(before, held, strict=True)), bool(skipped)


def test_bf16_sends_in_bf16() -> None:
    """Gradients and directions are rounded, and state stays in fp32; bases would differ by more."""
    keys = {"soap_max_precond_dim": 1}
    configs = (configure("ZeRO 0", "fp32", soap_dtype=dtype, **keys) for dtype in ("fp32", "bf16"))
    wide, narrow = (run_turns(train_with_random_gradients, 2, config)[0] for config in configs)
    for name, matrix in wide.items():
        assert 1e-4 < (matrix - narrow[name]).norm() / matrix.norm() < 0.05, name
    state = build(0, 1, configure("one rank", "bf16", soap_dtype="bf16")).optimizer.home_state
    assert {each.values.dtype for each in state} == {torch.float32}


@pytest.mark.parametrize(("precision", "most"), [("fp32", 10_000), ("bf16", 300)], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize(("num_ranks", "parallel"), MEMORY_LAYOUTS, ids=str)
def test_the_memory_of_an_update_is_predicted(
    num_ranks: int, parallel: dict[str, Any], precision: str, most: int
) -> None:
    """State at homes exactly; few tokens, so that the update has the peak, with the refresh of a basis."""
    optimizer = {"optimizer": "soap", "soap_dtype": precision, "soap_max_precond_dim": most}
    check_memory(num_ranks, parallel, precision, optimizer)


@pytest.mark.parametrize("most", [10_000, 100])
def test_the_flops_of_an_update_are_those_that_a_meter_counts(most: int) -> None:
    """A refresh is in each step, of which others have their part."""
    config = configure("one rank", soap_precondition_frequency=1, soap_max_precond_dim=most)
    state = build(0, 1, config)
    with FlopMemoryMeter() as meter:
        state.optimizer.step(torch.tensor(1.0), 0.1)
    shapes = [(32, 32)] * 8 + [(128, 32)] * 2 + [(32, 128)] * 2
    assert meter.flops == pytest.approx(sum(soap_flops(shape, config.optimizer) for shape in shapes), rel=1e-6)
    rare = config.optimizer.model_copy(update={"soap_precondition_frequency": 10})
    refreshes = soap_flops((32, 32), config.optimizer) - soap_flops((32, 32), rare)
    assert refreshes == pytest.approx(0.9 * 2 * ((4 + 8 / 3) * 32**3 + 2 * 32**3))


def test_the_predicted_time_of_an_update_has_its_refreshes_and_its_bytes() -> None:
    machine = load_machine("dgx_h200", "bf16", 4)

    def update_s(**keys: Any) -> float:
        return predict_time(RunSpec(configure("ZeRO 1", "bf16", **keys), 4, VOCAB_SIZE), machine).optimizer_s

    often, rare = update_s(soap_precondition_frequency=1), update_s()
    assert update_s(soap_dtype="bf16") < rare < often
    assert update_s(soap_max_precond_dim=1) < rare


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("soap_precondition_frequency", 0),
        ("soap_shampoo_beta", 1.0),
        ("soap_max_precond_dim", 0),
        ("soap_dtype", "fp16"),
    ],
)
def test_wrong_values_are_refused(key: str, value: float | str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: {optimizer: soap}")
    with pytest.raises(UserError, match=rf"optimizer\.{key}={value}"):
        resolve(path, [f"optimizer.{key}={value}"], 1)
