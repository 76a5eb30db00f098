"""Fact: what is measured on this machine is written as an accelerator and a cluster that the cost model reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d import calibrate, runtime
from megatron3d.cost.hardware import load_accelerator, load_cluster
from megatron3d.cost.kernels import device
from megatron3d.cost.step import machine_with


def test_local_files_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are those of the exchange; a product takes what it was measured to take, twofold on a shared core.

    The exchange on shared cores takes 1.5 times as long, where products take twice as long.
    """
    two = {"product_s": 2e-3, "small_s": 1e-3, "large_s": 5e-3, "alone_s": 2e-4}
    many = {**two, "product_s": 4e-3, "large_s": 7.5e-3}
    monkeypatch.setattr(runtime, "launch", lambda num_ranks, function, *args: two if num_ranks == 2 else many)
    monkeypatch.setattr(runtime, "num_cores", lambda: 2)
    sheet, cluster = calibrate.calibrate(tmp_path, budget_s=0.02)
    accelerator, local = load_accelerator("local", tmp_path), load_cluster("local", tmp_path / "clusters")
    assert sheet.name == cluster.name == "local.yaml"
    level = local.levels[0]
    assert level.gb_s == pytest.approx(2**21 / 4e-3 / 1e9, rel=1e-3) and level.latency_us == 100 and local.cores == 2
    assert local.call_us == 800 and 2**local.crowding == pytest.approx(1.5, rel=1e-3)
    assert machine_with(local, accelerator, "fp32", 4).network.slowdown == pytest.approx(1.5, rel=1e-3)
    one, shared = (device(accelerator, "fp32", 4, slowdown) for slowdown in (1.0, 2.0))
    flops = 2 * 1024 * 256 * 1024
    assert one.product_s(1024, 256, 1024) >= flops / one.peak > 0
    assert shared.product_s(1024, 256, 1024) == pytest.approx(2 * one.product_s(1024, 256, 1024))


def test_best_is_the_fastest_of_several() -> None:
    """The first call is not counted: it may have something to set up."""
    works = iter([10**6, 10, 10**5, *[10**5] * 10**6])
    slow, fast = (
        calibrate.best_s(lambda: sum(range(10**6)), 0.01),
        calibrate.best_s(lambda: sum(range(next(works))), 0.05),
    )
    assert 0 <= fast < slow
