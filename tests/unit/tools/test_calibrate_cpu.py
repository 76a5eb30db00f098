"""Fact: this machine's measurements are written as an accelerator and a cluster that the cost model reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.forecast.time.hardware import (
    Cluster,
    Network,
    NetworkLevel,
    device_model,
    load_accelerator,
    load_cluster,
)
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from tools import calibrate_cpu
from tools.calibrate_cpu import Elapsed


@pytest.mark.slow
def test_local_files_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are those of the exchange; a GEMM takes its measured time, doubled on a shared core."""
    took = {"alone": Elapsed(2e-4, 1e-4), "call": Elapsed(1e-3, 0.0), "bytes": Elapsed(4e-3, 3e-3)}
    monkeypatch.setattr(process, "launch", lambda num_ranks, function, *args: took)
    monkeypatch.setattr(process, "num_cores", lambda: 2)
    sheet, cluster = calibrate_cpu.calibrate(tmp_path, budget_s=0.06)
    accelerator, local = load_accelerator("local", tmp_path), load_cluster("local", tmp_path / "clusters")
    assert sheet.name == cluster.name == "local.yaml"
    assert load_accelerator(load_cluster(str(cluster)).accelerator) == accelerator  # by its path, from any folder
    level = local.levels[0]
    assert level.gb_s == pytest.approx(2**21 / 4e-3 / 1e9, rel=1e-3) and level.latency_us == 100 and local.cores == 2
    assert (local.call_us, local.call_busy, local.bytes_busy) == (800, 0.1, 0.75)
    one, shared = (device_model(accelerator, "fp32", 4, slowdown) for slowdown in (1.0, 2.0))
    flops = 2 * 1024 * 256 * 1024
    assert one.gemm_s(1024, 256, 1024) >= flops / one.peak > 0
    assert shared.gemm_s(1024, 256, 1024) == pytest.approx(2 * one.gemm_s(1024, 256, 1024))


def test_ranks_that_share_cores_compute_while_others_wait() -> None:
    """A collective whose bytes keep a core busy half of the time takes 1 s with a core per rank.

    With fewer cores the waiting half grows for a group of all ranks, and less for a group of half of them.
    """
    level = NetworkLevel(name="node", ranks=8, gb_s=1, latency_us=0)
    local = Cluster(name="n", accelerator="a", levels=(level,), source="s", cores=2, bytes_busy=0.5)

    def seconds(group: int, ranks: int) -> float:
        mesh = Mesh((("rest", ranks // group), ("t", group)))
        return Network(local, local.slowdown(ranks)).seconds(Traffic("all_gather", ("t",), 1e9), mesh)

    assert [seconds(2, 2), seconds(4, 4), seconds(2, 4), seconds(2, 8)] == [1, 1.5, 1.25, 2.125]


def test_ranks_that_share_cores_wait_for_each_others_computation() -> None:
    """The collective is pure latency, half of it CPU work.

    A group of all ranks also waits for slower work; with a group of half of them the others use the cores meanwhile.
    """
    level = NetworkLevel(name="node", ranks=8, gb_s=1e9, latency_us=0)
    local = Cluster(name="n", accelerator="a", levels=(level,), source="s", cores=2, call_us=1e6, call_busy=0.5)

    def seconds(group: int, ranks: int) -> float:
        mesh = Mesh((("rest", ranks // group), ("t", group)))
        return Network(local, local.slowdown(ranks)).seconds(Traffic("all_gather", ("t",), 0), mesh)

    assert [seconds(2, 2), seconds(4, 4), seconds(8, 8), seconds(2, 4), seconds(4, 8)] == [1, 2, 4, 1.25, 2.5]


def test_the_time_of_a_call_is_a_median() -> None:
    """The first collective is not counted, since it may include setup, and one late collective has no influence."""
    cases = iter([10**6, 10**4, 10**6, *[10**4] * 10**6])
    most, late = (
        calibrate_cpu.median_call_s(lambda: sum(range(next(cases))), 0.1),
        calibrate_cpu.median_call_s(lambda: sum(range(10**6)), 0.1),
    )
    assert 0 < most < late / 2
