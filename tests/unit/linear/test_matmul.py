"""Fact: under every plan the matmul gives torch's product and gradients, and saves only shards for backward.

In backward the communication overlaps both GEMMs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.matmul import Matmul
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.matmuls import linear
from tests.support.shards import cut, error, every_group, normal, plan_comm, pretended_world
from tests.support.turn_ranks import run_turns

NAMES = ("a", "b", "c")
CUBE = MatmulPlan(m=("a",), k=("c",), n=("b",), x={"b": "M"}, w={"a": "K"}, y={"c": "N"})
IN_TURN = [
    MatmulPlan(n=NAMES, x={"a": "M", "b": "K", "c": "M"}),
    MatmulPlan(m=NAMES, w={"a": "K", "b": "N", "c": "K"}),
    MatmulPlan(k=NAMES, y={"a": "N", "b": "M", "c": "N"}),
]
MESH = Mesh((("a", 2), ("b", 2), ("c", 2)))


def random_plan(seed: int) -> MatmulPlan:
    """Draw any plan over three axes, in any order."""
    draw = random.Random(seed)
    owner = {axis: draw.choice("mkn") for axis in draw.sample(NAMES, 3)}
    m, k, n = (tuple(axis for axis in owner if owner[axis] == letter) for letter in "mkn")
    x = {axis: dim for axis in n if (dim := draw.choice(("M", "K", None)))}
    w = {axis: dim for axis in m if (dim := draw.choice(("N", "K", None)))}
    return MatmulPlan(m, k, n, x, w, {axis: draw.choice(("M", "N", None)) for axis in k})


def cases() -> list[tuple[str, Mesh, MatmulPlan]]:
    """Return every form of every mode with the embedding, plans that move two dims in turn, and thirty random plans."""
    out = []
    for name, entry in MODES.items():
        for form in entry.forms:
            mode = build_mode(name, form, entry.default_shape(8))
            out += [(f"{name} {form}", Mesh(mode.axes), plan) for plan in (mode.expand, mode.contract, mode.embed)]
    out += [(f"in turn: {plan}", MESH, plan) for plan in IN_TURN]
    return out + [(f"random plan {seed}: {random_plan(seed)}", MESH, random_plan(seed)) for seed in range(30)]


def errors(matmul: Matmul, with_bias: bool) -> dict[str, float]:
    """Return relative errors of Y and of the gradients, the latter reduced by the gradient rule."""
    plan, comm, mesh = matmul.plan, matmul.comm, matmul.comm.mesh
    x_MK, w_NK, b_N, dy_MN = normal(24, 40, seed=1), normal(56, 40, seed=2), normal(56, seed=3), normal(24, 56, seed=4)
    whole = [t.requires_grad_() for t in (x_MK, w_NK, b_N)]
    y_MN = F.linear(x_MK, w_NK, b_N if with_bias else None)
    y_MN.backward(dy_MN)

    layouts = (plan.x_layout, plan.w_layout, plan.y_layout[1:])
    w_copies, b_copies = tuple(axis for axis in plan.m if axis not in plan.w), mesh.in_order(plan.y_layout[0])
    x, w, b = (cut(t.detach(), layout, mesh).requires_grad_() for t, layout in zip(whole, layouts, strict=True))
    y = matmul(x, w, b if with_bias else None)
    y.backward(cut(dy_MN, plan.y_layout, mesh))
    found = {"y": error(y, cut(y_MN.detach(), plan.y_layout, mesh))}
    sums: dict[str, tuple[Tensor, Axes]] = {"x": (x, ()), "w": (w, w_copies)} | (
        {"b": (b, b_copies)} if with_bias else {}
    )
    for (name, (part, axes)), full, layout in zip(sums.items(), whole, layouts, strict=False):
        assert part.grad is not None and full.grad is not None, f"{name} has no gradient"
        found[f"d{name}"] = error(comm.all_reduce(part.grad, axes).wait(), cut(full.grad, layout, mesh))
    return found


def wrong(rank: int, world_size: int) -> list[str]:
    comms = {mesh: every_group(mesh.at(rank)) for mesh in dict.fromkeys(mesh for _, mesh, _ in cases())}
    return [
        f"{name} on rank {rank}: {found}"
        for number, (name, mesh, plan) in enumerate(cases())
        if not max((found := errors(Matmul(plan.on(mesh), comms[mesh]), number % 3 != 0)).values()) < 1e-13
    ]


def test_every_plan_multiplies() -> None:
    assert run_turns(wrong, 8) == [[]] * 8


@pytest.mark.parametrize("bias", [True, False])
def test_on_one_rank_only_torchs_linear_is_called(bias: bool) -> None:
    mesh = Mesh((("a", 1), ("b", 1), ("c", 1)))
    x, w = normal(3, 4, seed=1).requires_grad_(), normal(5, 4, seed=2).requires_grad_()
    b = normal(5, seed=3).requires_grad_() if bias else None
    nobody: Any = None
    y = linear(x, w, b, CUBE.on(mesh), nobody)
    assert type(y.grad_fn) is type(F.linear(x, w, b).grad_fn)


def test_only_shards_are_kept_for_backward() -> None:
    kept: list[tuple[int, ...]] = []
    with pretended_world(0, 8):
        comm = plan_comm(MESH, CUBE)
        x, w = torch.ones(6, 10, requires_grad=True), torch.ones(14, 5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            linear(x, w, torch.ones(7, requires_grad=True), CUBE, comm)
    assert kept == [(6, 10), (14, 5)]


class Diary(TorchDispatchMode):
    """Log GEMMs, and the start and wait of collectives."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm, self.mesh, self.events = comm, comm.mesh, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise"):
            self.events.append("multiply")
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, pending: Pending) -> Pending:
        self.events.append(f"begin {name}")

        def finish() -> Tensor:
            self.events.append(f"end {name}")
            return pending.wait()

        return Pending(finish)

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._note(f"gather {'x'.join(axes)}", self.comm.all_gather(x, axes, dim))

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._note(f"scatter {'x'.join(axes)}", self.comm.reduce_scatter(x, axes, dim))

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        return self._note(f"sum {'x'.join(axes)}", self.comm.all_reduce(x, axes, op))


def test_backward_communicates_next_to_both_gemms() -> None:
    """3-D all-gathers X over b, W over a and dY over c."""
    with pretended_world(0, 8):
        diary: Any = Diary(plan_comm(MESH, CUBE))
        x, w = torch.ones(6, 10, requires_grad=True), torch.ones(14, 5, requires_grad=True)
        y = linear(x, w, None, CUBE, diary)
        diary.events.clear()
        with diary:
            y.sum().backward()
    events = diary.events
    first, second = (i for i, event in enumerate(events) if event == "multiply")
    assert events.index("begin gather b") < first < events.index("end gather b") < second
    assert first < events.index("begin scatter b") < second < events.index("end scatter b")
    assert events[second + 1] == "begin scatter a"
