"""Fact: a plan's tables define where X, W and Y are stored, and its traffic has a closed form.

Swapping exchanges K and N and is its own inverse; adjacent axes that move one dim make one collective.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.layout import layout_axes
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, Traffic, moves, traffic
from megatron3d.parallel.mesh import Mesh

NAMES = tuple("abcd")
CUBE = MatmulPlan(m=("x",), k=("z",), n=("y",), x={"y": "M"}, w={"x": "K"}, y={"z": "N"})


@st.composite
def plans(draw: st.DrawFn) -> MatmulPlan:
    """Draw any plan over up to four axes."""
    owner = {axis: draw(st.sampled_from("mkn-")) for axis in draw(st.permutations(NAMES))}
    m, k, n = (tuple(axis for axis in owner if owner[axis] == letter) for letter in "mkn")
    x = {axis: dim for axis in n if (dim := draw(st.sampled_from(("M", "K", None))))}
    w = {axis: dim for axis in m if (dim := draw(st.sampled_from(("N", "K", None))))}
    y = {axis: draw(st.sampled_from(("M", "N", None))) for axis in k}
    return MatmulPlan(m, k, n, x, w, y)


meshes = st.tuples(*[st.integers(1, 3)] * 4).map(lambda sizes: Mesh(tuple(zip(NAMES, sizes, strict=True))))


@given(plan=plans())
def test_swapping_twice_changes_nothing(plan: MatmulPlan) -> None:
    assert plan.swapped().swapped() == plan
    assert plan.transposed().transposed() == plan


@given(plan=plans())
def test_the_swapped_plan_chains_on_both_sides(plan: MatmulPlan) -> None:
    swapped = plan.swapped()
    assert swapped.x_layout == plan.y_layout
    assert swapped.y_layout == plan.x_layout


@given(plan=plans())
def test_the_transposed_plan_reads_the_same_stored_matrix(plan: MatmulPlan) -> None:
    n, k = plan.w_layout
    assert plan.transposed().w_layout == (k, n)
    assert plan.transposed().x_layout == plan.y_layout


@given(plan=plans())
def test_no_axis_splits_a_stored_operand_twice(plan: MatmulPlan) -> None:
    for layout in (plan.x_layout, plan.w_layout, plan.y_layout):
        assert len(layout_axes(layout)) == sum(len(axes) for axes in layout)


@given(plan=plans(), mesh=meshes)
def test_on_a_mesh_only_axes_that_split_something_remain(plan: MatmulPlan, mesh: Mesh) -> None:
    live = plan.on(mesh)
    for name in ("x_layout", "w_layout", "y_layout"):
        assert getattr(live, name) == tuple(mesh.nontrivial(axes) for axes in getattr(plan, name))
    assert live.on(mesh) == live
    assert traffic(plan, mesh, 36, 36, 36, 1) == traffic(live, mesh, 36, 36, 36, 1)


@given(plan=plans())
def test_backward_of_x_is_forward_of_the_swapped_plan(plan: MatmulPlan) -> None:
    """dX = dY W is the matmul with K and N exchanged: it is reduced like the Y of the swapped plan, with K for N."""
    exchanged = tuple(Move(axes, "K" if dim == "N" else dim) for axes, dim in moves(plan.swapped().y))
    assert plan.dx_moves == exchanged


@given(plan=plans(), mesh=meshes)
def test_traffic_is_proportional_and_counts_only_live_axes(plan: MatmulPlan, mesh: Mesh) -> None:
    once, twice = (traffic(plan, mesh, 36, 36, 36, itemsize) for itemsize in (2, 4))
    assert [t.wire_bytes * 2 for t in once] == [t.wire_bytes for t in twice]
    assert all(mesh.size(t.axes) > 1 and t.wire_bytes > 0 for t in once)


def test_neighbouring_axes_of_one_dimension_are_fused() -> None:
    table = {"a": "M", "b": "M", "c": "K", "d": "M"}
    assert moves(table) == (Move(("a", "b"), "M"), Move(("c",), "K"), Move(("d",), "M"))
    assert moves({"a": None, "b": None}) == (Move(("a", "b"), None),)


def test_3d_traffic_by_hand() -> None:
    """2 x 3 x 5 ranks, M=60, N=90, K=150, two bytes; numbers from the picture in the mode's file."""
    mesh = Mesh((("x", 2), ("y", 3), ("z", 5)))
    x, w, y = 2 * 60 * 150 // (2 * 5), 2 * 90 * 150 // (3 * 5), 2 * 60 * 90 // (2 * 3)
    forward = [
        Traffic("all_gather", ("y",), x * 2 / 3),
        Traffic("all_gather", ("x",), w * 1 / 2),
        Traffic("reduce_scatter", ("z",), y * 4 / 5),
    ]
    backward = [
        Traffic("all_gather", ("z",), y * 4 / 5),
        Traffic("all_gather", ("x",), w * 1 / 2),
        Traffic("all_gather", ("y",), x * 2 / 3),
        Traffic("reduce_scatter", ("y",), x * 2 / 3),
        Traffic("reduce_scatter", ("x",), w * 1 / 2),
    ]
    assert traffic(CUBE, mesh, 60, 90, 150, 2) == forward + backward


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather() -> None:
    mesh = Mesh((("t", 4),))
    reduced, scattered = (MatmulPlan(k=("t",), y={"t": dim}) for dim in (None, "M"))
    all_reduce = traffic(reduced, mesh, 8, 8, 8, 1)
    assert all_reduce == [Traffic("all_reduce", ("t",), 2 * 64 * 3 / 4)]
    assert sum(t.wire_bytes for t in traffic(scattered, mesh, 8, 8, 8, 1)) == all_reduce[0].wire_bytes


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"m": ("a",), "n": ("a",)}, "an axis splits two"),
        ({"n": ("a",), "x": {"b": "M"}}, "X is whole along"),
        ({"n": ("a", "b"), "x": {"b": "M", "a": "M"}}, "not in the order of N"),
        ({"m": ("a",), "w": {"b": "K"}}, "W is whole along"),
        ({"k": ("a",)}, "Y is partial over"),
        ({"y": {"a": "M"}}, "Y is partial over"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        MatmulPlan(**fields)
