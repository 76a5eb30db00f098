"""Fact: one Triton kernel updates weights and moments like `update_chunked`, and rounds bf16 moments by the same hash.

The bugs that this catches are another hash, rounding of a moment with the bits of the other one, an update that is not
skipped, and elements behind the end of a tensor.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.triton_process import check, needs_triton


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernel_updates_like_the_reference(tmp_path: Path) -> None:
    found = check("fused_adamw", "interpret", tmp_path, TRITON_INTERPRET="1")
    assert len(found) == 12
    assert {name: value for name, value in found.items() if not value < 1e-3} == {}
    assert {name: value for name, value in found.items() if "bfloat16" not in name and not value < 1e-6} == {}


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    found = check("fused_adamw", "assemble", tmp_path)
    assert set(found) == {"80", "90"} and all("st.global" in ptx for ptx in found.values())
