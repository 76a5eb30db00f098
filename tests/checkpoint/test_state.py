"""Fact: parameters saved under any layout load under any other one: their logical numbers are the same, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.checkpoint.state import param_pieces, writes
from megatron3d.checkpoint.store import load, save
from megatron3d.layout import ParamSpec, Part
from megatron3d.mesh import Mesh
from megatron3d.shard import part_views

AXES = ("pipeline", "data", "x", "y")
DIM_AXES = [(), ("x",), ("y",), ("y", "x"), ("x", "data"), ("data",)]


@st.composite
def arrangements(draw):
    """A mesh, a layout on it and a number of blocks."""
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 1), (1, 3, 2), (2, 1, 3)]))
    rows, columns = draw(
        st.tuples(st.sampled_from(DIM_AXES), st.sampled_from(DIM_AXES)).filter(
            lambda two: not set(two[0]) & set(two[1])
        )
    )
    return Mesh(tuple(zip(AXES, (1, *sizes), strict=True))), (rows, columns), draw(st.integers(1, 3))


def make_spec(parts, mesh, layout, blocks):
    """The parts with dim 0 padded as this arrangement needs."""
    multiple = mesh.size(layout[0]) * blocks
    padded = tuple(Part(name, shape, (-(-shape[0] // multiple) * multiple, shape[1])) for name, shape in parts)
    return ParamSpec(padded, layout, token_axes=(), blocks=blocks)


def logical(name, shape):
    """Numbers that tell every element of every tensor from every other one."""
    size = shape[0] * shape[1]
    return torch.arange(size, dtype=torch.float64).reshape(shape) + 1000 * sum(name.encode())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    columns=st.integers(1, 5),
    source=arrangements(),
    target=arrangements(),
)
def test_any_layout_to_any_other(run_ranks, rows, columns, source, target):
    parts = [(f"part{i}", (n, columns)) for i, n in enumerate(rows)]

    def save_all(comm):
        mesh, layout, blocks = comm.mesh, source[1], source[2]
        spec = make_spec(parts, mesh, layout, blocks)
        local = torch.full(spec.local_shape(mesh), float("nan"), dtype=torch.float64)
        for part, box, view in part_views(spec, local, mesh):
            view.copy_(logical(part.name, part.shape)[tuple(slice(*ends) for ends in box)])
        pieces = param_pieces("model", spec, local, mesh) if writes(spec, mesh) else []
        return save(root, 7, pieces, {}, comm)

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        assert set(run_ranks(source[0], save_all)) == {root / "iter_0000007"}
        mesh, layout, blocks = target
        for rank in range(mesh.world_size):
            here = mesh.at(rank)
            spec = make_spec(parts, here, layout, blocks)
            local = torch.zeros(spec.local_shape(here), dtype=torch.float32, requires_grad=True)
            load(root / "iter_0000007", param_pieces("model", spec, local, here))
            for part, box, view in part_views(spec, local, here):
                expected = logical(part.name, part.shape)[tuple(slice(*ends) for ends in box)]
                assert torch.equal(view.double(), expected)
                view.zero_()
            assert not local.any(), "padding was filled"


def test_names():
    spec = ParamSpec((Part("q", (2,), (2,)), Part("k", (2,), (2,))), ((),), token_axes=())
    pieces = param_pieces("optimizer.exp_avg", spec, torch.zeros(4), Mesh(tuple((axis, 1) for axis in AXES)))
    assert [piece.name for piece in pieces] == ["optimizer.exp_avg.q", "optimizer.exp_avg.k"]


@pytest.mark.parametrize("layout", [((), ()), (("x",), ()), (("x", "data"), ("y",))])
@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1), (1, 0)])
def test_every_box_has_one_writer(layout, holders):
    mesh = Mesh((("pipeline", 2), ("data", 2), ("x", 2), ("y", 3)))
    spec = ParamSpec((Part("w", (12, 12), (12, 12)),), layout, token_axes=(), holders=holders)
    split = {axis for axes in layout for axis in axes}
    writers = [mesh.at(rank) for rank in range(mesh.world_size) if writes(spec, mesh.at(rank))]
    held = {(here.coord("pipeline"), *(here.coord(axis) for axis in sorted(split))) for here in writers}
    assert len(held) == len(writers) == mesh.size(split)
    assert {here.coord("pipeline") for here in writers} == {holders[0]}
