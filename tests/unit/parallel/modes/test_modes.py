"""Fact: every mode is two plans that fit, for any sizes of its axes, and the modes are special cases of each other.

Only the last section, which states these special cases, names modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.layout import layout_axes
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.parallel.modes.mode import Mode

EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
every_form = pytest.mark.parametrize("name,form", EVERY_FORM)


def shape_of(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes[: len(MODES[name].axis_names)]


@every_form
@pytest.mark.parametrize("sizes", list(product((1, 2, 3), repeat=3)))
def test_expand_and_contract_chain_at_any_shape(name: str, form: str, sizes: tuple[int, ...]) -> None:
    shape = shape_of(name, sizes)
    mode = build_mode(name, form, shape)
    mesh = Mesh(mode.axes)
    assert mode.axes == tuple(zip(MODES[name].axis_names, shape, strict=True))
    expand, contract, embed = (plan.on(mesh) for plan in (mode.expand, mode.contract, mode.embed))
    assert (expand.y_layout, contract.y_layout) == (contract.x_layout, expand.x_layout)
    assert embed.y_layout == expand.x_layout
    assert expand.m == contract.m == mesh.nontrivial(mode.batch_axes)


@every_form
def test_every_axis_is_used_and_nothing_is_split_twice(name: str, form: str) -> None:
    mode = build_mode(name, form, shape_of(name, (2, 3, 2)))
    for plan in (mode.expand, mode.contract, mode.embed):
        assert {*plan.m, *plan.k, *plan.n} == {axis for axis, _ in mode.axes}
    for layout in (mode.residual, mode.inner, mode.expand.w_layout, mode.contract.w_layout):
        assert len(layout_axes(layout)) == sum(len(axes) for axes in layout)


@every_form
def test_the_embedding_reads_the_heads_matrix(name: str, form: str) -> None:
    mode = build_mode(name, form, shape_of(name, (2, 3, 2)))
    vocab, hidden = mode.expand.w_layout
    assert mode.embed.w_layout == (hidden, vocab)


@every_form
def test_attention_has_whole_sequences(name: str, form: str) -> None:
    """Tokens of the inner activations are split over the batch first, before any other axis splits them."""
    mode = build_mode(name, form, shape_of(name, (2, 3, 2)))
    assert mode.inner[0][: len(mode.batch_axes)] == mode.batch_axes
    assert mode.residual[0][: len(mode.batch_axes)] == mode.batch_axes


@pytest.mark.parametrize("name", MODES)
@given(size=st.integers(1, 512))
def test_the_default_shape_has_the_given_size_and_one_number_per_axis(name: str, size: int) -> None:
    shape = MODES[name].default_shape(size)
    assert math.prod(shape) == size and min(shape) >= 1
    assert len(shape) == len(MODES[name].axis_names)


def test_the_first_form_is_the_default() -> None:
    for name, entry in MODES.items():
        shape = shape_of(name, (2, 3, 2))
        assert build_mode(name, None, shape) == build_mode(name, next(iter(entry.forms)), shape)


def test_plans_that_do_not_fit_are_refused() -> None:
    up = MatmulPlan(n=("t",), x={"t": "M"})
    with pytest.raises(AssertionError, match="contract expects X as"):
        Mode("crooked", (("t", 2),), expand=up, contract=up)


SHAPES_AT_8 = {"1d": (8,), "2d": (2, 4), "2.5d": (2, 2, 2), "3d": (2, 2, 2), "grid": (2, 2, 2)}
SHAPES_AT_12 = {"1d": (12,), "2d": (3, 4), "2.5d": (3, 2, 2), "3d": (2, 2, 3), "grid": (2, 2, 3)}
SHAPES_AT_64 = {"1d": (64,), "2d": (8, 8), "3d": (4, 4, 4), "grid": (4, 4, 4)}


@pytest.mark.parametrize("size,shapes", [(8, SHAPES_AT_8), (12, SHAPES_AT_12), (64, SHAPES_AT_64)])
def test_default_shapes(size: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    assert {name: MODES[name].default_shape(size) for name in shapes} == shapes


STREAMS = {
    ("1d", "replicated"): ("- -", "- t"),
    ("1d", "sequence_parallel"): ("t -", "- t"),
    ("2d", "summa"): ("r c", "r c"),
    ("2d", "weight_stationary"): ("r c", "r c"),
    ("2.5d", "summa"): ("d·r c", "d·r c"),
    ("2.5d", "weight_stationary"): ("d·r c", "d·r c"),
    ("3d", "heads"): ("x·y z", "x y·z"),
    ("3d", "tokens"): ("x·y z", "x·z y"),
    ("grid", "all_reduce"): ("z x", "z y"),
    ("grid", "scatter"): ("z x·y", "z y·x"),
}


@pytest.mark.parametrize("name,form", STREAMS)
def test_axes_that_split_tokens_and_features_of_both_streams(name: str, form: str) -> None:
    mode = build_mode(name, form, shape_of(name, (2, 3, 2)))
    shown = tuple(" ".join("·".join(axes) or "-" for axes in layout) for layout in (mode.residual, mode.inner))
    assert shown == STREAMS[name, form]


def renamed(plan: MatmulPlan, names: Mapping[str, str]) -> MatmulPlan:
    """Return the plan with its axes renamed."""
    m, k, n = (tuple(names[axis] for axis in axes) for axes in (plan.m, plan.k, plan.n))
    x, w = ({names[axis]: dim for axis, dim in table.items()} for table in (plan.x, plan.w))
    return MatmulPlan(m, k, n, x, w, {names[axis]: dim for axis, dim in plan.y.items()})


def live_plans(name: str, form: str, shape: tuple[int, ...]) -> list[MatmulPlan]:
    mode = build_mode(name, form, shape)
    return [plan.on(Mesh(mode.axes)) for plan in (mode.expand, mode.contract, mode.embed)]


@pytest.mark.parametrize(
    "special,general",
    [
        (("1d", "sequence_parallel", (4,)), ("3d", "heads", (1, 4, 1))),
        (("1d", "sequence_parallel", (4,)), ("3d", "tokens", (1, 4, 1))),
        (("1d", "replicated", (4,)), ("grid", "all_reduce", (1, 4, 1))),
    ],
)
def test_3d_with_one_axis_equals_1d(
    special: tuple[str, str, tuple[int, ...]], general: tuple[str, str, tuple[int, ...]]
) -> None:
    assert live_plans(*special) == [renamed(plan, {"y": "t"}) for plan in live_plans(*general)]


@pytest.mark.parametrize("form", MODES["2.5d"].forms)
def test_2_5d_without_depth_equals_2d(form: str) -> None:
    assert live_plans("2.5d", form, (1, 2, 3)) == live_plans("2d", form, (2, 3))


@every_form
def test_one_rank_communicates_nothing(name: str, form: str) -> None:
    assert live_plans(name, form, shape_of(name, (1, 1, 1))) == [MatmulPlan()] * 3
