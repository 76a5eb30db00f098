"""Fact: parameters saved in any layout load in any other one with the same logical values, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.checkpoint.pieces import ParamRange, param_pieces, split_among_replicas
from megatron3d.checkpoint.store import load, save
from megatron3d.model.params import part_views
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import Mesh

AXES = ("pipeline", "data", "x", "y")
DIM_AXES = [(), ("x",), ("y",), ("y", "x"), ("x", "data"), ("data",)]


@st.composite
def arrangements(draw):
    """Draw a mesh, a layout on it and a number of blocks."""
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 1), (1, 3, 2), (2, 1, 3)]))
    rows, columns = draw(
        st.tuples(st.sampled_from(DIM_AXES), st.sampled_from(DIM_AXES)).filter(
            lambda two: not set(two[0]) & set(two[1])
        )
    )
    return Mesh(tuple(zip(AXES, (1, *sizes), strict=True))), (rows, columns), draw(st.integers(1, 3))


def make_spec(parts, mesh, layout, blocks):
    """Return the parameter's parts with dim 0 padded for this layout."""
    multiple = mesh.size(layout[0]) * blocks
    padded = tuple(Part(name, shape, (-(-shape[0] // multiple) * multiple, shape[1])) for name, shape in parts)
    return ParamSpec(padded, layout, token_axes=(), blocks=blocks)


def logical(name, shape):
    """Return values that are unique across all elements of all tensors."""
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
        ((_, _, low, high),) = split_among_replicas([ParamRange("w", spec, 0, local.numel())], mesh)
        pieces = param_pieces("model", spec, local.view(-1)[low:high], mesh, low)
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


@pytest.mark.parametrize("shared_out", [(), ("data",)])
@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1)])
def test_every_element_has_one_writer_and_the_holders_write_equally_much(holders, shared_out):
    """Save parameters of different layouts; each ZeRO rank holds half of them, split at any element."""
    mesh = Mesh((("pipeline", 2), ("data", 2), ("x", 2), ("y", 3)))
    layouts = [((), ()), (("x",), ()), ((), ("y",)), (("x",), ("y",)), ((), ())]
    specs = [
        ParamSpec((Part(f"w{i}", (n, 12), (n, 12)),), layout, token_axes=(), holders=holders)
        for i, (layout, n) in enumerate(zip(layouts, (12, 24, 60, 120, 60), strict=True))
    ]
    times = {f"m.w{i}": torch.zeros(spec.parts[0].shape) for i, spec in enumerate(specs)}
    written = []
    for here in map(mesh.at, range(mesh.world_size)):
        if here.coord("pipeline") not in holders:
            continue
        held = []
        for i, spec in enumerate(specs):
            numel = torch.Size(spec.local_shape(here)).numel()
            edges = (0, numel // 2 - 1, numel) if shared_out else (0, numel)
            at = here.coord("data") if shared_out else 0
            held.append(ParamRange(f"w{i}", spec, edges[at], edges[at + 1]))
        mine = list(split_among_replicas(held, here, shared_out))
        assert [each.name for each in sorted(mine)] == [f"w{i}" for i in range(len(specs))]
        for _, spec, start, stop in mine:
            for piece in param_pieces("m", spec, torch.zeros(stop - start), here, start):
                times[piece.name][tuple(slice(*ends) for ends in piece.box)] += 1
        written.append(sum(stop - start for _, _, start, stop in mine))
    assert all((count == 1).all() for count in times.values())
    if len(holders) == 1 or not shared_out:  # else the halves of the replicas may coincide with ZeRO's
        assert max(written) - min(written) <= 12 * 2 * 5, f"a row at each edge and holder of each group: {written}"


def test_no_rank_writes_part_of_a_row():
    """Some ranks write nothing if there are more ranks than rows, and none writes part of a row."""
    mesh = Mesh((("pipeline", 1), ("data", 5)))
    spec = ParamSpec((Part("w", (3, 4), (3, 4)),), ((), ()), token_axes=())
    found = [next(split_among_replicas([ParamRange("w", spec, 0, 12)], mesh.at(rank))) for rank in range(5)]
    assert [(low, high) for _, _, low, high in found] == [(0, 0), (0, 4), (4, 4), (4, 8), (8, 12)]
