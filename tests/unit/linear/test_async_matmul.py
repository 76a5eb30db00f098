"""Fact: a matmul with rounds gives the plain matmul's numbers and bytes, and leaves exposed what the closed form says.

What is exposed is observed: a collective that begins and ends without a GEMM between.  The table of the documentation
is evaluated against the same closed form.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, GatheredProduct, Pending, PutProduct
from megatron3d.comm.recording import Recorder
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.matmul import Matmul
from megatron3d.linear.overlap_plan import IN_ROUNDS, TPOverlap, async_plan, in_rounds
from megatron3d.parallel.layout import box, box_shape
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Traffic, flows
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes import MODES, build_mode
from tests.support.shards import every_group, plan_comm, pretended_world
from tests.support.turn_ranks import run_turns
from tests.unit.linear.test_matmul import Diary, cases, errors
from tests.unit.viz.test_layouts import evaluated

PAGE = Path(__file__).parents[3] / "docs" / "tensor_parallel.md"
FORMS = [(name, form) for name, entry in MODES.items() for form in entry.forms]
ALONE = TPOverlap(input_grad=False, in_rounds=True)
M, N, K = 48, 40, 56


def wrong(rank: int, world_size: int) -> list[str]:
    """Return the errors of every plan; where nothing follows the dgrad GEMM, dX is reduced in rounds."""
    comms = {mesh: every_group(mesh.at(rank)) for mesh in dict.fromkeys(mesh for _, mesh, _ in cases())}
    return [
        f"{name} on rank {rank}: {found}"
        for number, (name, mesh, plan) in enumerate(cases())
        if not max((found := errors(Matmul(plan.on(mesh), comms[mesh], ALONE), number % 3 != 0)).values()) < 1e-13
    ]


def test_every_plan_multiplies() -> None:
    assert run_turns(wrong, 8) == [[]] * 8


def test_the_cases_have_every_collective_in_rounds() -> None:
    found = [async_plan(plan.on(mesh)) for _, mesh, plan in cases()]
    for operand in ("x", "y", "dy", "dx"):
        moved = {getattr(each, operand).dim for each in found if getattr(each, operand)}
        assert moved == ({"M"} if operand in ("x", "dy") else {"M", "N"} if operand == "y" else {"M", "K"})


class Exposure(Diary):
    """Log collectives, with their bytes, that begin and end without a GEMM between."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(Recorder(comm))
        self.exposed = list[Traffic]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::mm.out":
            self.events.append("multiply")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, name: str, pending: Pending) -> Pending:
        call, begin = self.comm.calls[-1], len(self.events)  # type: ignore[attr-defined]

        def finish() -> Tensor:
            if "multiply" not in self.events[begin:]:
                self.exposed.append(call)
            return pending.wait()

        return Pending(finish)

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        return self._note("shift", self.comm.shift(x, out, axes, by))

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)


def plans() -> Iterator[tuple[str, Mesh, MatmulPlan]]:
    """Yield expand and contract of every form on eight ranks."""
    for name, form in FORMS:
        mode = build_mode(name, form, MODES[name].default_shape(8))
        mesh = Mesh(mode.axes)
        for way, plan in (("expand", mode.expand), ("contract", mode.contract)):
            yield f"{name} {form} {way}", mesh, plan.on(mesh)


def observed(overlap: TPOverlap, plan: MatmulPlan, mesh: Mesh, split: bool) -> tuple[list[Traffic], list[Traffic]]:
    """Return the exposed collectives of X and Y in forward and backward; `split` defers the weight gradient."""
    comm: Any = Exposure(plan_comm(mesh, plan))
    queue = WgradQueue(MainGrads()) if split else None
    shapes = ((M, K), plan.x_layout), ((N, K), plan.w_layout)
    x, w = (
        torch.ones(box_shape(box(shape, layout, mesh)), dtype=torch.bfloat16, requires_grad=True)
        for shape, layout in shapes
    )

    def taken() -> list[Traffic]:
        found = sorted(call for call in comm.exposed if not set(call.axes) & set(plan.w))
        comm.exposed.clear()
        return found

    with comm:
        y = Matmul(plan, comm, overlap, wgrads=queue)(x, w)
        forward = taken()
        if queue is None:
            y.sum().backward()
            return forward, taken()
        with queue.defer() as late:
            y.sum().backward()
        with torch.no_grad():
            late.pop()()
    return forward, taken()


class ExposedCalls(NamedTuple):
    """Collectives of one matmul that begin and end without a GEMM between."""

    forward: list[Traffic]
    backward: list[Traffic]


def exposed_calls(sent: Flows, plan: MatmulPlan, rounds: bool, splits_backward: bool = False) -> ExposedCalls:
    """Return what remains exposed with all `tp_comm_overlap_*`, and with `tp_comm_overlap` where `rounds`.

    W is prefetched, and dW reduced, during the GEMMs of neighbours.  In backward X is gathered during the dgrad GEMM
    and dX reduced during the wgrad GEMM, unless the schedule splits them.
    """
    named = in_rounds(sent, plan) if rounds else sent
    backward = named.gather_dy + (named.reduce_dx + sent.gather_x if splits_backward else [])
    found = (named.gather_x + named.reduce_y, backward)
    return ExposedCalls(*([call for call in calls if call.collective not in IN_ROUNDS] for calls in found))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_what_remains_exposed_is_the_closed_form(rounds: bool, split: bool) -> None:
    with pretended_world(0, 8):
        for name, mesh, plan in plans():
            sent = flows(plan, mesh, M, N, K, itemsize=2)
            told = exposed_calls(sent, plan, rounds, split)
            assert observed(TPOverlap(in_rounds=rounds), plan, mesh, split) == (
                sorted(told.forward),
                sorted(told.backward),
            ), name


def recorded(overlap: TPOverlap, plan: MatmulPlan, mesh: Mesh) -> list[Traffic]:
    recorder = Recorder(plan_comm(mesh, plan))
    x, w = (
        torch.ones(box_shape(box(shape, layout, mesh)), dtype=torch.bfloat16, requires_grad=True)
        for shape, layout in (((M, K), plan.x_layout), ((N, K), plan.w_layout))
    )
    Matmul(plan, recorder, overlap)(x, w).sum().backward()
    return sorted(recorder.calls)


def listed(sent: Flows, named: Flows) -> list[Traffic]:
    """Return all collectives of a matmul with these names, W's twice; backward gathers X plainly."""
    forward = named.gather_x + sent.gather_w + named.reduce_y
    return sorted(forward + named.gather_dy + sent.gather_w + sent.gather_x + named.reduce_dx + sent.reduce_dw)


def test_the_bytes_in_rounds_are_the_plans_closed_form() -> None:
    with pretended_world(0, 8):
        for name, mesh, plan in plans():
            sent = flows(plan, mesh, M, N, K, itemsize=2)
            named = in_rounds(sent, plan)
            assert recorded(ALONE, plan, mesh) == listed(sent, named), name
            assert recorded(TPOverlap(input_grad=False), plan, mesh) == listed(sent, sent), name
            assert [call[1:] for calls in named for call in calls] == [call[1:] for calls in sent for call in calls]


def test_the_table_of_the_page_is_the_closed_form() -> None:
    """Each cell, a fraction of X, Y and dY, is evaluated for random sizes of the axes."""
    part = PAGE.read_text(encoding="utf-8").partition("## What remains exposed")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([\w.]+)` ([\w, ]+) \| (ordinary|in rounds) \| (.+) \|$", part, re.M)
    told = [
        ((name, form.strip()), how == "in rounds", cells)
        for name, forms, how, cells in lines
        for form in forms.split(",")
    ]
    assert sorted(form for form, rounds, _ in told if not rounds) == sorted(FORMS)
    able = {name.rpartition(" ")[0] for name, _, plan in plans() if not async_plan(plan).is_empty}
    assert {f"{name} {form}" for (name, form), rounds, _ in told if rounds} == able
    for (name, form), rounds, cells in told:
        names = MODES[name].axis_names
        sizes = dict(zip(names, random.Random(name + form).choices((2, 3, 4, 5), k=len(names)), strict=True))
        mode = build_mode(name, form, tuple(sizes.values()))
        expected = [
            each for plan in (mode.expand, mode.contract) for each in exposed_fractions(plan, Mesh(mode.axes), rounds)
        ]
        assert [evaluated(cell, sizes) for cell in cells.split("|")] == pytest.approx(expected), (name, form, rounds)


def exposed_fractions(plan: MatmulPlan, mesh: Mesh, rounds: bool) -> list[float]:
    """Return the exposed bytes of X and Y in forward and of dY in backward, as fractions of all of X, Y and dY."""
    plan, size = plan.on(mesh), 2**20
    sent = flows(plan, mesh, size, size, size, itemsize=1)
    told = exposed_calls(sent, plan, rounds)
    in_x = [call for call in told.forward if call in sent.gather_x]
    in_y = [call for call in told.forward if call in sent.reduce_y]
    return [sum(call.wire_bytes for call in calls) / size**2 for calls in (in_x, in_y, told.backward)]
