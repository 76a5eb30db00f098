"""Fact: a run saved before the package was reorganised resumes with the numbers that it would have had.

`data/stored_run` holds two runs after 4 of 8 iterations, as commit 4555ed4 wrote them, and the steps, evaluations and
final tensors that the same commit reached at iteration 8.  On the same torch, CPU vendor and CPU capability every
number has the same bits; elsewhere kernels round differently, and numbers agree to a tolerance of the run's precision.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.linear.gemm import onednn_gemms
from megatron3d.metrics.journal import read_journal
from tests.support.pool import Pool
from tests.support.tiny_run import run_as_rank, steps, stored

STORED = Path(__file__).parent / "data" / "stored_run"
# Largest relative difference where kernels round differently.
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-10}
# A bias of all keys shifts the scores of a query alike, which softmax ignores: its gradient is 0 but for rounding, and
# the bias is what Adam makes of that.
ROUNDING, LARGEST_ROUNDING = "attention.k.bias", 1e-5


def environment(precision: str) -> Mapping[str, str]:
    """Return the versions and CPU properties that determine how kernels round."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    vendors = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    gemms = {"fp32_gemms_by_onednn": onednn_gemms(torch.device("cpu"), torch.float32)} if precision == "fp32" else {}
    return gemms | {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_vendor": vendors[0] if vendors else platform.processor(),
    }


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


@pytest.mark.parametrize(("name", "num_ranks", "precision"), [("one_process", 1, "fp32"), ("four_ranks", 4, "fp64")])
def test_a_stored_run_continues(name: str, num_ranks: int, precision: str, pool: Pool, tmp_path: Path) -> None:
    folder, expected = tmp_path / "run", json.loads((STORED / name / "expected.json").read_text())
    shutil.copytree(STORED / name / "run", folder)
    before = read_journal(folder / "metrics.jsonl")
    places = [f"data.data_path={STORED / 'corpus'}", f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
    overrides = [*places, "train.exit_interval=null"]
    codes = pool.run(run_as_rank, num_ranks, STORED / name / "config.yaml", [overrides])
    assert codes == [[0]] * num_ranks
    assert read_journal(folder / "metrics.jsonl")[: len(before)] == before

    found, tensors = steps(folder), stored(folder, 8)
    assert [iteration for iteration, *_ in found] == list(range(1, 9))
    if environment(precision) == expected["environment"]:
        assert [list(step) for step in found] == expected["steps"]
        assert digests(tensors) == expected["sha256"]
    assert_close(found, expected["steps"], TOLERANCE[precision])
    norms = {name: tensor.double().norm().item() for name, tensor in tensors.items()}
    assert norms.keys() == expected["norms"].keys()
    for name, norm in norms.items():
        if precision == "fp32" and name.endswith(ROUNDING):
            assert max(norm, expected["norms"][name]) < LARGEST_ROUNDING, name
        else:
            assert norm == pytest.approx(expected["norms"][name], rel=TOLERANCE[precision]), name


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare losses and gradient norms with the stored ones."""
    for step, wanted in zip(found, expected, strict=True):
        assert list(step) == pytest.approx(wanted, rel=tolerance)
