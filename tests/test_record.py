"""Fact: what every mode's matmuls really move, forward and backward, is their closed form: the same collectives over
the same axes with the same bytes, on real ranks and on any rank of a world that only pretends to exist.
"""

from __future__ import annotations

import pytest
import torch

from megatron3d.comm import ProcessComm
from megatron3d.layout import box, box_shape
from megatron3d.mesh import Mesh
from megatron3d.modes import MODES, build_mode
from megatron3d.ops.matmul import linear
from megatron3d.plan import MatmulPlan, Traffic, traffic
from megatron3d.record import Recorder
from tests.pool import Pool
from tests.shards import plan_comm, pretended_world

EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
FUSED = {
    "gather over two axes at once": MatmulPlan(m=("a",), n=("b", "c"), x={"b": "M", "c": "M"}, w={"a": "K"}),
    "two dimensions in turn": MatmulPlan(n=("a", "b", "c"), x={"a": "M", "c": "K"}),
    "scatter, all-reduce, scatter": MatmulPlan(k=("a", "b", "c"), y={"a": "N", "b": None, "c": "M"}),
    "gather W twice": MatmulPlan(m=("a", "b"), k=("c",), w={"a": "K", "b": "N"}, y={"c": None}),
}


def plans(size: int) -> list[tuple[str, Mesh, MatmulPlan]]:
    """Both plans of every form at its default shape, and plans whose collectives are fused or chained."""
    cases = []
    for name, form in EVERY_FORM:
        mode = build_mode(name, form, MODES[name].default_shape(size))
        mesh = Mesh((("data", 1), *mode.axes))
        cases += [(f"{name} {form} {mode.axes}", mesh, plan) for plan in (mode.expand, mode.contract)]
    if size == 8:
        cases += [(name, Mesh((("a", 2), ("b", 2), ("c", 2))), plan) for name, plan in FUSED.items()]
    return cases


def recorded(comm: ProcessComm, plan: MatmulPlan, m: int, n: int, k: int) -> list[Traffic]:
    """What one forward and backward moves."""
    recorder, plan = Recorder(comm), plan.on(comm.mesh)
    x, w = (
        torch.ones(box_shape(box(shape, layout, comm.mesh)), dtype=torch.bfloat16, requires_grad=True)
        for shape, layout in (((m, k), plan.x_layout), ((n, k), plan.w_layout))
    )
    bias = torch.ones(box_shape(box((m, n), plan.y_layout, comm.mesh))[1], dtype=torch.bfloat16, requires_grad=True)
    linear(x, w, bias, plan, recorder).sum().backward()
    return recorder.calls


def difference(name: str, mesh: Mesh, plan: MatmulPlan, comm: ProcessComm) -> list[str]:
    """Nothing, or what moved beside what should have; the three sizes differ."""
    unit = mesh.world_size
    m, n, k = 3 * unit, 5 * unit, 7 * unit
    got, expected = sorted(recorded(comm, plan, m, n, k)), sorted(traffic(plan, mesh, m, n, k, itemsize=2))
    return [] if got == expected else [f"{name} on rank {mesh.rank}: moved {got}, closed form {expected}"]


def moved_otherwise(rank: int, world_size: int) -> list[str]:
    return [
        line
        for name, mesh, plan in plans(world_size)
        for line in difference(name, mesh.at(rank), plan, plan_comm(mesh.at(rank), plan))
    ]


@pytest.mark.parametrize("world_size", [8, 4])
def test_recorded_traffic_is_the_closed_form(pool: Pool, world_size: int) -> None:
    assert pool.run(moved_otherwise, world_size) == [[]] * world_size


@pytest.mark.parametrize("rank", [0, 37])
def test_closed_form_on_a_rank_of_64(rank: int) -> None:
    with pretended_world(rank, 64):
        assert moved_otherwise(rank, 64) == []


def test_frozen_operands_move_less() -> None:
    """Without a gradient of W its reduction is not made; the recorder passes results on unchanged."""
    plan, mesh = FUSED["gather over two axes at once"], Mesh((("a", 2), ("b", 2), ("c", 2)))
    with pretended_world(0, 8):
        recorder = Recorder(plan_comm(mesh, plan))
        x = torch.ones(2, 4, requires_grad=True)
        linear(x, torch.ones(4, 2), None, plan, recorder).sum().backward()
    kinds = [(call.collective, call.axes) for call in recorder.calls]
    assert ("reduce_scatter", ("b", "c")) in kinds
    assert ("reduce_scatter", ("a",)) not in kinds


def test_trivial_axes_are_not_recorded() -> None:
    recorder = Recorder(ProcessComm(Mesh((("x", 1), ("y", 1))), []))
    x = torch.ones(3)
    assert recorder.all_reduce(x, ("x", "y")).wait() is x
    assert recorder.all_gather(x, ("x",), 0).wait() is x
    assert recorder.calls == []


def test_a_ring_sends_all_but_its_own_part() -> None:
    """Three ranks, eight bytes each: a gather sends the pieces of the two others."""
    mesh = Mesh((("x", 3),))
    with pretended_world(0, 3):
        recorder = Recorder(ProcessComm(mesh, [("x",)]))
        recorder.all_gather(torch.ones(2), ("x",), 0).wait()
        recorder.reduce_scatter(torch.ones(6), ("x",), 0).wait()
        recorder.all_reduce(torch.ones(6), ("x",)).wait()
    assert [call.wire_bytes for call in recorder.calls] == [16, 16, 32]
