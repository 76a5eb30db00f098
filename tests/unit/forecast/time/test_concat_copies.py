"""Fact: an operand that is gathered or scattered along its second dim is copied once; along the first, never."""

from __future__ import annotations

import pytest

from megatron3d.forecast.time.tasks import ConcatCopies, concat_copies
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES

M, N, K, ITEMSIZE = 48, 96, 24, 2
MESH = Mesh((("a", 2), ("b", 3)))


def joined(plan: MatmulPlan, mesh: Mesh = MESH) -> ConcatCopies:
    return concat_copies(plan, mesh, M, N, K, ITEMSIZE)


def test_the_second_dimension_is_read_and_written_once_more() -> None:
    """X is sharded along K over b and all-gathered, and dX reduce-scattered; Y along N over a, with its gradient."""
    plan = MatmulPlan(m=("a",), k=(), n=("b",), x={"b": "K"}, w={}, y={})
    x = 2 * (M // 2) * K * ITEMSIZE
    assert joined(plan) == ConcatCopies(x, 0, 0, 0, x)
    scattering = MatmulPlan(m=("b",), k=("a",), n=(), x={}, w={}, y={"a": "N"})
    y = 2 * (M // 3) * N * ITEMSIZE
    assert joined(scattering) == ConcatCopies(0, 0, y, y, 0)


def test_the_first_dimension_needs_no_copy() -> None:
    plan = MatmulPlan(m=("a",), k=(), n=("b",), x={"b": "M"}, w={"a": "N"}, y={})
    assert joined(plan) == ConcatCopies(0, 0, 0, 0, 0)


@pytest.mark.parametrize("form", MODES["1d"].forms)
def test_megatrons_layout_copies_nothing(form: str) -> None:
    mode, mesh = MODES["1d"].forms[form]((4,)), Mesh((("t", 4),))
    for plan in (mode.expand, mode.contract):
        assert sum(joined(plan, mesh)) == 0
