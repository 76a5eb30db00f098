"""Fact: fused norms over sharded features have the values of torch's operations, in few kernels that compile for GPUs.

Triton interprets the kernels on the CPU.  Bugs that this finds: statistics of one rank only, a masked tail that counts,
the last tokens of a group that two groups count, and the mean of a rank's own features in the gradient.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.ops.norm import SHARDED_NORMS, sharded_norm
from megatron3d.runtime.machine import has_triton
from tests.support.triton_process import check, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_have_the_values_of_torchs_operations(tmp_path: Path) -> None:
    """RMSNorm took 17 kernels and LayerNorm 25 as torch's operations; now both take five of ours and a sum, in fp32."""
    found = check("fused_norm", "interpret", tmp_path, TRITON_INTERPRET="1")
    assert len(found["differences"]) == 126
    assert {name: value for name, value in found["differences"].items() if not value <= 1} == {}
    for kernels in found["kernels"].values():
        assert len(kernels) == 6, kernels


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    found = check("fused_norm", "assemble", tmp_path)
    assert len(found) == 5 * 2
    assert all("st.global" in ptx for ptx in found.values())


def test_the_norm_follows_device_and_dtype() -> None:
    on_gpus = "triton" if has_triton() else "torch"
    assert sharded_norm(True, torch.bfloat16) == sharded_norm(True, torch.float32) == on_gpus
    assert sharded_norm(True, torch.float64) == sharded_norm(False, torch.bfloat16) == "torch"
    assert {"torch", "triton"} == set(SHARDED_NORMS)
