"""Fact: a chunk of the loss is as large as its limit allows, and every rank of a collective cuts the same chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.ops.plan import LossChunk, token_moves
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode

ALONE = Mesh((("t", 1),))
EVERY_FORM = [(name, form) for name, entry in MODES.items() for form in entry.forms]
MIB = 2**20


@pytest.mark.parametrize(
    ("vocab", "tokens", "mib", "expected"),
    [
        (128_256, 8192, 1024, 2048),  # 4 chunks of 2048, not 3 of 2093 and a rest
        (128_256 // 8, 8192, 1024, 8192),  # TP 8: one chunk, where 1024 tokens would make 8
        (50_304, 12_288, 1024, 4096),
        (128_256, 8192, 1, 2),  # below a tile of a GEMM
    ],
)
def test_chunks_of_models_by_hand(vocab: int, tokens: int, mib: int, expected: int) -> None:
    assert LossChunk(num_bytes=mib * MIB).rows(tokens, 4 * vocab, MatmulPlan(), ALONE) == expected


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
@given(units=st.integers(1, 50), limit=st.integers(1, 10_000), token_bytes=st.integers(1, 50))
def test_chunks_keep_the_limit_and_divide(name: str, form: str, units: int, limit: int, token_bytes: int) -> None:
    mode = build_mode(name, form, MODES[name].default_shape(8))
    mesh = Mesh(mode.axes, 0)
    plan = mode.expand.on(mesh)
    gathered, scattered = (mesh.size(axes) for axes in token_moves(plan))
    num_rows = units * scattered
    rows = LossChunk(num_bytes=limit).rows(num_rows, token_bytes, plan, mesh)
    assert rows >= 1 and rows * gathered % scattered == 0
    assert rows * gathered * token_bytes <= limit or rows == LossChunk(tokens=1).rows(num_rows, 1, plan, mesh)
    assert rows <= max(num_rows, 128 * scattered)


def test_a_limit_of_tokens_counts_them_after_the_all_gather() -> None:
    mode = build_mode("1d", "sequence_parallel", (4,))
    mesh = Mesh(mode.axes, 0)
    assert LossChunk(1024).rows(4096, 1, mode.expand.on(mesh), mesh) == 256
    assert LossChunk(1024).rows(4096, 1, MatmulPlan(), ALONE) == 1024
