"""Fact: the logical views of all ranks of a layout cover each logical tensor exactly once and alias the local one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.model.params import part_views
from megatron3d.parallel.layout import ParamSpec, Part
from megatron3d.parallel.mesh import Mesh

LAYOUTS = [((), ()), (("x",), ()), (("y", "x"), ("z",)), (("z",), ("x", "y"))]


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    layout=st.sampled_from(LAYOUTS),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    blocks=st.integers(1, 3),
    columns=st.integers(1, 5),
)
def test_views_cover_each_part_once(sizes, layout, rows, blocks, columns):
    mesh = Mesh(tuple(zip("xyz", sizes, strict=True)))
    multiple = mesh.size("xyz") * blocks
    parts = tuple(Part(str(i), (n, columns), (-(-n // multiple) * multiple, columns)) for i, n in enumerate(rows))
    spec = ParamSpec(parts, layout, token_axes=(), blocks=blocks)
    times = {part.name: torch.zeros(part.shape) for part in parts}
    unsplit = [axis for axis in "xyz" if axis not in {a for axes in layout for a in axes}]
    for rank in range(mesh.world_size):
        here = mesh.at(rank)
        if any(here.coord(axis) for axis in unsplit):
            continue
        local = torch.zeros(spec.local_shape(here), requires_grad=True)
        for part, box, view in part_views(spec, local, here):
            view += 1
            times[part.name][tuple(slice(*ends) for ends in box)] += view
        assert set(local.detach().flatten().tolist()) <= {0.0, 1.0}
    assert all((count == 1).all() for count in times.values())


def test_blocks_keep_runs_of_all_parts_together():
    spec = ParamSpec((Part("q", (8,), (8,)), Part("k", (4,), (4,))), (("x",),), token_axes=(), blocks=2)
    mesh = Mesh((("x", 2),), rank=1)
    local = torch.arange(6)
    found = [(part.name, box, view.tolist()) for part, box, view in part_views(spec, local, mesh)]
    assert found == [
        ("q", ((4, 6),), [0, 1]),
        ("k", ((2, 3),), [2]),
        ("q", ((6, 8),), [3, 4]),
        ("k", ((3, 4),), [5]),
    ]
