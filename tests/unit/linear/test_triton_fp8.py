"""Fact: Triton's kernel quantizes to the bits of the plain form, for every operand of a linear."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.triton_process import check, needs_triton


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernel_writes_the_same_bits(tmp_path: Path) -> None:
    found = check("fused_fp8", "interpret", tmp_path, TRITON_INTERPRET="1")
    assert len(found) == 2 * 2 * 2 * 7 and not any(found.values()), found


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    assert all("st.global" in ptx for ptx in check("fused_fp8", "assemble", tmp_path).values())
