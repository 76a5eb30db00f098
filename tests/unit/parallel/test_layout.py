"""Fact: the boxes of a layout's ranks tile a tensor exactly once, and every other axis holds replicas.

A gradient is all-reduced over the axes that shard the tokens but not the parameter.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.layout import Layout, ParamSpec, Part, box, box_shape, layout_axes, num_copies, span
from megatron3d.parallel.mesh import Mesh

NAMES = ("data", "x", "y", "z")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, Layout, tuple[int, ...]]:
    """Draw a mesh, a layout over some of its axes in any order, and a shape that need not divide."""
    mesh = Mesh(tuple((name, draw(st.integers(1, 3))) for name in NAMES))
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for name in draw(st.permutations(NAMES)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            dims[dim] = (*dims[dim], name)
    return mesh, tuple(dims), shape


@given(case=cases())
def test_boxes_tile_a_tensor_exactly_as_often_as_it_is_copied(case: tuple[Mesh, Layout, tuple[int, ...]]) -> None:
    mesh, layout, shape = case
    times = np.zeros(shape, dtype=int)
    for rank in range(mesh.world_size):
        times[tuple(slice(*ends) for ends in box(shape, layout, mesh.at(rank)))] += 1
    copies = num_copies(layout, mesh, mesh.names)
    assert (times == copies).all()
    assert copies == mesh.world_size // mesh.size(layout_axes(layout))


@given(case=cases())
def test_copies_are_equal_boxes(case: tuple[Mesh, Layout, tuple[int, ...]]) -> None:
    mesh, layout, shape = case
    free = tuple(axis for axis in mesh.names if axis not in layout_axes(layout))
    for rank in range(mesh.world_size):
        assert {box(shape, layout, mesh.at(other)) for other in mesh.at(rank).ranks(free)} == {
            box(shape, layout, mesh.at(rank))
        }


@given(size=st.integers(0, 40), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_spans_follow_each_other_in_the_order_of_the_fused_index(size: int, sizes: tuple[int, int]) -> None:
    mesh, axes = Mesh((("x", sizes[0]), ("y", sizes[1]))), ("y", "x")
    spans = {mesh.at(rank).index(axes): span(size, axes, mesh.at(rank)) for rank in range(mesh.world_size)}
    end = 0
    for index in range(mesh.world_size):
        low, high = spans[index]
        assert low in (end, high)
        end = max(end, high)
    assert end == size


@given(pieces=st.integers(1, 5), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_divisible_dimensions_are_split_evenly(pieces: int, sizes: tuple[int, int]) -> None:
    mesh = Mesh((("x", sizes[0]), ("y", sizes[1])))
    for rank in range(mesh.world_size):
        low, high = span(pieces * mesh.world_size, ("x", "y"), mesh.at(rank))
        assert (low, high) == (pieces * rank, pieces * (rank + 1))


def test_uneven_pieces_are_short_at_the_end_of_each_axis() -> None:
    mesh = Mesh((("x", 2), ("y", 2)))
    assert [span(7, ("x", "y"), mesh.at(rank)) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [span(5, ("x", "y"), mesh.at(rank)) for rank in range(4)] == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_copies_are_counted_over_the_given_axes_only() -> None:
    mesh = Mesh((("data", 5), ("x", 2), ("y", 3)))
    assert num_copies((("x",), ()), mesh, ("data", "x", "y")) == 15
    assert num_copies((("x",), ()), mesh, ("x", "y")) == 3
    assert num_copies((("y", "x"), ("data",)), mesh, mesh.names) == 1


@given(case=cases(), token_axes=st.sets(st.sampled_from(NAMES)))
def test_gradient_rule(case: tuple[Mesh, Layout, tuple[int, ...]], token_axes: set[str]) -> None:
    mesh, layout, shape = case
    spec = ParamSpec((Part("w", shape, shape),), layout, tuple(token_axes))
    expected = [
        axis for axis, size in mesh.axes if size > 1 and axis in token_axes and all(axis not in axes for axes in layout)
    ]
    assert list(spec.reduce_axes(mesh)) == expected


@given(case=cases(), rows=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_local_shape_joins_the_boxes_of_all_parts(case: tuple[Mesh, Layout, tuple[int, ...]], rows: list[int]) -> None:
    mesh, layout, shape = case
    parts = tuple(Part(str(i), (n, *shape[1:]), (n, *shape[1:])) for i, n in enumerate(rows))
    spec = ParamSpec(parts, layout, ())
    here = mesh.at(mesh.world_size - 1)
    arrays = [np.zeros(part.shape)[tuple(slice(*e) for e in box(part.shape, layout, here))] for part in parts]
    assert spec.local_shape(here) == np.concatenate(arrays).shape
    assert [box_shape(held) for held in spec.part_boxes(here)] == [array.shape for array in arrays]


def test_shape_and_layout_of_different_lengths_are_refused() -> None:
    with pytest.raises(AssertionError, match="different lengths"):
        box((4, 4), (("x",),), Mesh((("x", 2),)))
