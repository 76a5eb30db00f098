"""Fact: rank, coordinates and index name the same process, and groups partition the world into equal parts.

The last axis varies fastest.
"""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.mesh import Mesh, disjoint_cover

NAMES = ("data", "x", "y", "z")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rank = draw(st.integers(0, math.prod(sizes) - 1))
    return Mesh(tuple(zip(NAMES, sizes, strict=False)), rank)


@st.composite
def meshes_with_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes())
    order = draw(st.permutations(mesh.names))
    return mesh, tuple(order[: draw(st.integers(0, len(order)))])


@given(mesh=meshes())
def test_ranks_count_the_grid_with_the_last_axis_fastest(mesh: Mesh) -> None:
    grid = product(*(range(size) for _, size in mesh.axes))
    coords = [tuple(mesh.at(rank).coord(axis) for axis in mesh.names) for rank in range(mesh.world_size)]
    assert coords == list(grid)


@given(case=meshes_with_axes())
def test_my_index_is_my_place_among_the_ranks_of_my_group(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    group = mesh.ranks(axes)
    assert len(group) == mesh.size(axes)
    assert group[mesh.index(axes)] == mesh.rank
    assert [mesh.at(rank).index(axes) for rank in group] == list(range(len(group)))
    assert all(mesh.at(rank).coord(name) == mesh.coord(name) for rank in group for name in set(mesh.names) - set(axes))


@given(case=meshes_with_axes())
def test_groups_partition_the_world_and_all_members_agree(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    groups = {mesh.at(rank).ranks(axes) for rank in range(mesh.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))


@given(case=meshes_with_axes())
def test_the_whole_mesh_in_order_is_the_world(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    assert mesh.ranks(mesh.names) == tuple(range(mesh.world_size))
    assert mesh.index(mesh.names) == mesh.rank
    assert mesh.in_order((*axes, *axes)) == tuple(name for name in mesh.names if name in axes)
    assert mesh.nontrivial(axes) == tuple(axis for axis in axes if mesh.sizes[axis] != 1)


def test_design_example() -> None:
    mesh = Mesh((("pipeline", 2), ("data", 3), ("x", 2), ("y", 2)), rank=17)
    assert [mesh.coord(axis) for axis in mesh.names] == [1, 1, 0, 1]
    assert mesh.ranks(("y",)) == (16, 17)
    assert mesh.ranks(("x", "y")) == (16, 17, 18, 19)
    assert mesh.ranks(("y", "x")) == (16, 18, 17, 19)
    assert mesh.ranks(("pipeline",)) == (5, 17)


def test_repeated_names_and_ranks_outside_are_refused() -> None:
    with pytest.raises(AssertionError, match="repeat a name"):
        Mesh((("x", 2), ("x", 2)))
    with pytest.raises(AssertionError, match="rank 4 is outside a world of 4"):
        Mesh((("x", 2), ("y", 2)), rank=4)


@given(sets=st.lists(st.lists(st.sampled_from(NAMES), unique=True).map(tuple), max_size=6))
def test_a_cover_has_every_axis_once_in_the_fewest_sets(sets: list[tuple[str, ...]]) -> None:
    """An axis that two sets have would count its ranks twice in a sum."""
    found = disjoint_cover(NAMES, sets)
    covers = [
        chosen
        for count in range(1, len(NAMES) + 1)
        for chosen in combinations(dict.fromkeys(sets), count)
        if sorted(axis for each in chosen for axis in each) == sorted(NAMES) and () not in chosen
    ]
    assert found in covers if covers else found == ()
    assert not covers or len(found) == min(map(len, covers))


PIECES = (("data", (("data.0", 2), ("data.1", 3))),)


def test_pieces_of_an_axis_number_its_ranks() -> None:
    for rank in range(24):
        mesh = Mesh((("pipeline", 2), ("data", 6), ("t", 2)), rank, PIECES)
        assert mesh.ranks(("data.0", "data.1")) == mesh.ranks(("data",))
        assert (
            mesh.index(("data.0", "data.1")) == mesh.index(("data",)) == 3 * mesh.coord("data.0") + mesh.coord("data.1")
        )
        assert mesh.ranks(("data.1", "t"))[mesh.index(("data.1", "t"))] == rank
        assert mesh.names == ("pipeline", "data", "t")


def test_what_is_taken_of_an_axis_leaves_its_pieces() -> None:
    mesh = Mesh((("pipeline", 2), ("data", 6), ("t", 2)), 0, PIECES)
    assert mesh.without(("data", "t"), ("data.1",)) == ("data.0", "t")
    assert mesh.without(("data", "t"), ("t",)) == ("data",)
    assert mesh.without(("data.0", "t"), ("data",)) == ("t",)
    assert mesh.without(("t", "data"), ()) == ("t", "data")
    assert mesh.in_order(("t", "data.1", "pipeline")) == ("pipeline", "data.1", "t")
