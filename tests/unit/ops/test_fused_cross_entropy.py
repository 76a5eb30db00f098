"""Fact: the fused loss has the values of the loss in torch's operations, and its kernels compile for GPUs.

Triton interprets the kernels on the CPU, for one rank and for vocabularies that ranks shard: the bugs that this catches
are a running sum that is not rescaled when the maximum grows, a maximum of one shard only, a label of another shard,
padding that counts, and a narrow gradient that overwrites logits of the next row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.ops.cross_entropy import LOSS_KERNELS, loss_kernel
from megatron3d.runtime.machine import has_triton
from tests.support.triton_process import check, needs_triton


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_have_the_values_of_torchs_operations(tmp_path: Path) -> None:
    found = check("fused_loss", "interpret", tmp_path, TRITON_INTERPRET="1")
    assert len(found) > 150
    assert {name: value for name, value in found.items() if not value <= 1} == {}


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_and_read_before_they_overwrite(tmp_path: Path) -> None:
    """Without the barrier between reading and writing, a warp could overwrite logits that another has yet to read."""
    found = check("fused_loss", "assemble", tmp_path)
    assert {f"{name} sm_{capability}" for name in ("statistics", "gradient") for capability in (80, 90)} == set(found)
    for capability in (80, 90):
        ptx = found[f"gradient sm_{capability}"]
        last_read, barrier, first_write = ptx.rindex("ld.global"), ptx.index("bar.sync"), ptx.index("st.global")
        assert last_read < barrier < first_write
        assert "cvt.rn.bf16" in ptx, "the gradient is not rounded to the nearest"


def test_the_loss_kernel_follows_device_and_dtype() -> None:
    on_gpus = "triton" if has_triton() else "torch"
    assert loss_kernel(True, torch.bfloat16) == loss_kernel(True, torch.float32) == on_gpus
    assert loss_kernel(True, torch.float64) == loss_kernel(False, torch.bfloat16) == "torch"
    assert {"torch", "triton"} == set(LOSS_KERNELS)
