"""Fact: in panels along any dim, the matmul gives the values and moves the bytes of the unpanelled one.

This includes a split backward; transient memory is smaller, and panels move during the GEMMs of their neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import Live
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.comm.recording import Recorder
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import Matmul
from megatron3d.linear.overlap_plan import Direction, TPOverlap
from megatron3d.ops.panelled_matmul import PanelledMatmul
from megatron3d.parallel.layout import box, box_shape
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.panel_plan import PanelPlan, split_into_panels
from tests.support.shards import cut, every_group, normal, plan_comm, pretended_world
from tests.support.turn_ranks import run_turns
from tests.unit.linear.test_matmul import CUBE, MESH, Diary, cases, errors

NUM_PANELS = 3


class Along(PanelledMatmul):
    """Matmul in panels along a given dim, regardless of what that overlaps."""

    def __init__(self, dim: str, plan: MatmulPlan, comm: Comm, wgrads: WgradQueue | None = None) -> None:
        super().__init__(plan, comm, TPOverlap(NUM_PANELS), None, wgrads)
        self.dim = dim

    def panels(self, at: Direction, x_MK: Tensor, w_NK: Tensor) -> PanelPlan:
        sizes = self.sizes(x_MK, w_NK)
        return split_into_panels(self.plan, self.dim, sizes[self.dim], NUM_PANELS, self.comm.mesh)


def wrong(rank: int, world_size: int, dim: str) -> list[str]:
    """Return the errors of every third plan, alternating with and without a bias."""
    comms = {mesh: every_group(mesh.at(rank)) for mesh in dict.fromkeys(mesh for _, mesh, _ in cases())}
    return [
        f"{name} along {dim} on rank {rank}: {found}"
        for number, (name, mesh, plan) in enumerate(cases())
        if not max((found := errors(Along(dim, plan.on(mesh), comms[mesh]), number % 2 == 0)).values()) < 1e-13
    ]


@pytest.mark.parametrize("dim", "MNK")
def test_every_plan_multiplies_along_every_dimension(dim: str) -> None:
    assert run_turns(wrong, 8, dim) == [[]] * 8


def registry() -> Iterator[tuple[str, Mesh, MatmulPlan]]:
    """Return expand and contract of every mode and form, with all axes above 1."""
    for name, entry in MODES.items():
        for form in entry.forms:
            mode = build_mode(name, form, entry.default_shape(8))
            for way, plan in (("expand", mode.expand), ("contract", mode.contract)):
                yield f"{name} {form} {way}", Mesh(mode.axes), plan


def shards(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's shards of X, W and bias, from values that all ranks agree on."""
    layouts = plan.x_layout, plan.w_layout, plan.y_layout[1:]
    wholes = normal(m, k, seed=1), normal(n, k, seed=2), normal(n, seed=3)
    x, w, b = (cut(t, layout, mesh).requires_grad_() for t, layout in zip(wholes, layouts, strict=True))
    return x, w, b


def outcome(matmul: Matmul, split: bool) -> tuple[list[Tensor], dict[object, float]]:
    """Return Y and all gradients, and the bytes moved over each axes; `split` defers the weight gradient."""
    recorder, grads = Recorder(matmul.comm), WgradQueue(MainGrads())
    mine = type(matmul)(matmul.plan, recorder, matmul.overlap, None, grads)
    x, w, b = shards(matmul.plan, recorder.mesh, 24, 56, 40)
    y = mine(x, w, b)
    dy = cut(normal(24, 56, seed=4), matmul.plan.y_layout, recorder.mesh)
    if split:
        with grads.defer() as late:
            y.backward(dy)
        assert w.grad is None, "the weight's gradient was not deferred"
        with torch.no_grad():
            late.pop()()
    else:
        y.backward(dy)
    moved: dict[object, float] = {}
    for kind, axes, wire_bytes in recorder.calls:
        moved[kind, axes] = moved.get((kind, axes), 0) + wire_bytes
    return [t for t in (y.detach(), x.grad, w.grad, b.grad) if t is not None], moved


def departs(rank: int, world_size: int) -> list[str]:
    """Return where panels, or panels with a split backward, differ from the unpanelled matmul in values or bytes."""
    out = []
    for name, mesh, plan in registry():
        comm = every_group(mesh.at(rank))
        values, moved = outcome(Matmul(plan.on(mesh), comm), split=False)
        for num_panels, split in ((1, True), (3, True), (100, False)):
            found, also_moved = outcome(PanelledMatmul(plan.on(mesh), comm, TPOverlap(num_panels)), split)
            off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, values, strict=True))
            if not off < 1e-13 or also_moved != pytest.approx(moved):
                out.append(f"{name}, {num_panels} panels, {split=}: off by {off}, moved {also_moved} not {moved}")
    return out


def test_panels_equal_the_whole_matmul_in_values_and_bytes() -> None:
    assert run_turns(departs, 8) == [[]] * 8


def peak(matmul: Matmul, sizes: tuple[int, int, int]) -> int:
    """Return the peak bytes of forward and backward on top of the stored operands."""
    mesh = matmul.comm.mesh
    layouts = zip(
        ((sizes[0], sizes[2]), (sizes[1], sizes[2])), (matmul.plan.x_layout, matmul.plan.w_layout), strict=True
    )
    x, w = (torch.ones(box_shape(box(shape, layout, mesh)), requires_grad=True) for shape, layout in layouts)
    with Live([x, w]) as live:
        y = matmul(x, w)
        y.backward(torch.ones_like(y))
    return live.peak - x.nbytes - w.nbytes


def gathers_or_scatters(plan: MatmulPlan) -> bool:
    return bool(plan.x or plan.w or plan.dy)


@pytest.mark.parametrize("sizes", [(1024, 512, 256), (256, 512, 1024), (256, 1024, 256)])
def test_panels_need_less_memory(sizes: tuple[int, int, int]) -> None:
    """Holds where an operand is all-gathered or reduce-scattered; an all-reduce is in place, without workspace."""
    with pretended_world(0, 8):
        for name, mesh, plan in registry():
            comm = plan_comm(mesh, plan)
            in_panels, whole = (
                peak(each, sizes) for each in (PanelledMatmul(plan, comm, TPOverlap(8)), Matmul(plan, comm))
            )
            assert in_panels < whole or not gathers_or_scatters(plan), f"{name}: {in_panels} not below {whole} bytes"


def open_at_products(events: list[str]) -> list[Counter[str]]:
    """Return the collectives in flight at each GEMM: all-gathers, and others."""
    found, now = [], Counter[str]()
    for event in events:
        if event == "multiply":
            found.append(now.copy())
        else:
            what, kind, _ = event.split()
            now["gather" if kind == "gather" else "reduce"] += 1 if what == "begin" else -1
    return found


@pytest.mark.parametrize("num_panels", [2, 4])
def test_panels_overlap_with_the_gemms_of_their_neighbours(num_panels: int) -> None:
    with pretended_world(0, 8):
        for name, mesh, plan in registry():
            diary: Any = Diary(plan_comm(mesh, plan))
            matmul = PanelledMatmul(plan, diary, TPOverlap(num_panels))
            x, w, _ = shards(plan, mesh, 64, 64, 64)
            with diary:
                matmul(x, w)
            panels = matmul.panels(Direction.FORWARD, x, w)
            open_at = open_at_products(diary.events)
            assert len(open_at) == panels.num_panels, f"{name}: {len(open_at)} products for {panels.num_panels} panels"
            if (plan.x and panels.dim in "MK") or (plan.w and panels.dim in "NK"):
                assert all(each["gather"] for each in open_at[:-1]), f"{name}: nothing arrives under a product"
            if plan.y and panels.dim in "MN":
                assert all(each["reduce"] for each in open_at[1:]), f"{name}: nothing leaves under a product"


def test_a_panelled_backward_overlaps_with_every_gemm() -> None:
    """3-D along N: dY and W arrive and dW leaves in panels; X arrives once, dX is accumulated before it is reduced."""
    with pretended_world(0, 8):
        diary: Any = Diary(plan_comm(MESH, CUBE))
        x, w, _ = shards(CUBE, MESH, 48, 48, 48)
        y = Along("N", CUBE, diary)(x, w)
        diary.events.clear()
        with diary:
            y.sum().backward()
    open_at = open_at_products(diary.events)
    assert [each["gather"] for each in open_at] == [3, 2, 2, 2, 0, 0]
    assert [each["reduce"] for each in open_at] == [0, 0, 1, 1, 1, 2]
