"""Fact: with the measured numbers of GPUs the cost model gives the measured times back; here CPUs do what GPUs do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.forecast.time.hardware import Network, device_model, load_accelerator, load_cluster
from megatron3d.metrics.timers import Clock
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import process
from tests.support.turn_ranks import make_comm, run_turns
from tools import calibrate as tool
from tools import calibrate_gpus
from tools.calibrate_cpu import PASSES, Measured
from tools.calibrate_gpus import NAME, Sizes, accelerator_sheet, levels, link_seconds, measure_rank

TINY = Sizes(rows=64, depths=(16, 64), batch=1, heads=2, head=8, length=32, gathered=1024)
LARGE = Sizes()
# Of an H100 that reaches 700 TFLOP/s, a ramp-up of 200 of K, and 2 TB/s, next to 7 others.
FOUND = {
    "memory_gib": 79.2,
    "units": 132,
    "shallow": 2 * 8192**2 * 1224 / 700e12,
    "deep": 2 * 8192**2 * 8392 / 700e12,
    "memory": PASSES * 2 * 8192**2 / 2e12,
    "attention": 4 * 64 * 4096**2 * 128 / 2 / 4e14,
    "attention_both": 4 * 64 * 4096**2 * 128 / 2 * (1 / 4e14 + 2.5 / 3e14),
    "launches": 36e-6,
    "context_gib": 0.5,
    "communicator_gib": 0.3,
    "small": 21e-6,
    "large": 21e-6 + 7 * 4 * 2**23 / 350e9,
}


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "a GPU without a data sheet"])
def test_predicted_kernels_take_as_long_as_the_measured_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.yaml").write_text(accelerator_sheet(FOUND, LARGE, "bf16", name, "here"), encoding="utf-8")
    accelerator = load_accelerator(NAME, tmp_path)
    assert accelerator.peak_tflops["bf16"] == pytest.approx(989.4 if "H100" in name else 700, rel=1e-5)
    model = device_model(accelerator, "bf16", 2)
    assert model.kernels.ramp_k == pytest.approx(200, abs=0.01) and model.kernels.launch_us == 6
    # The sheet of an unknown part says that it reaches its peak, of which the model's last wave of tiles takes a part.
    assert model.gemm_s(8192, 8192, 8192) == pytest.approx(FOUND["deep"], rel=1e-4 if "H100" in name else 0.04)
    assert model.memory_bound_s(PASSES * 2 * 8192**2) == pytest.approx(FOUND["memory"], rel=1e-3)
    flops = 4 * 64 * 4096**2 * 128 / 2
    assert model.attention_s(flops, False) == pytest.approx(FOUND["attention"], rel=1e-3)
    assert model.attention_s(2.5 * flops, True) == pytest.approx(FOUND["attention_both"] - FOUND["attention"], rel=1e-3)


def test_predicted_gathers_take_as_long_as_the_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level between nodes, and only that, is the one of the network that the user names."""
    monkeypatch.setattr(process, "launch", lambda num_ranks, function, *args: (FOUND, "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(process, "num_gpus", lambda: 8)
    assert tool.main(["--output-dir", str(tmp_path), "--network", "eos"]) == 0
    cluster = load_cluster(str(tmp_path / "clusters" / f"{NAME}.yaml"))
    assert load_accelerator(cluster.accelerator).device_names == NAME
    assert [level.ranks for level in cluster.levels] == [8, 4608]
    assert cluster.levels[1] == load_cluster("eos").levels[1]
    sent = 7 * 4 * LARGE.gathered
    seconds = Network(cluster).seconds(Traffic("all_gather", ("t",), sent), Mesh((("t", 8),)))
    assert seconds == pytest.approx(FOUND["large"], rel=1e-3)
    assert tool.main(["--output-dir", str(tmp_path), "--overwrite"]) == 0
    assert [level.ranks for level in load_cluster(NAME, tmp_path / "clusters").levels] == [8]


def test_links_that_are_not_measured_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "num_gpus", lambda: 1)
    words = ["--output-dir", str(tmp_path)]
    assert tool.main(words) == 2
    assert "one GPU has no links to measure: give --network" in capsys.readouterr().err
    assert tool.main([*words, "--network", "nowhere"]) == 2
    assert "cluster nowhere: there is none" in capsys.readouterr().err
    assert [level.ranks for level in levels(FOUND, 1, LARGE, load_cluster("eos"))] == [8, 4608]
    assert tool.main([*words, "--cpu", "--network", "eos"]) == 2
    assert "for GPUs only" in capsys.readouterr().err


def test_every_number_is_measured(tmp_path: Path) -> None:
    """One rank measures its kernels, and two the all-gathers between them."""
    cpu = torch.device("cpu")
    found, name = measure_rank("fp32", TINY, 1e-4, on_cpu=True)
    gathers = run_turns(_gathers, 2, cpu)
    assert name == "CPU" and min(min(each.values()) for each in gathers) > 0 and {*found, *gathers[0]} == {*FOUND}
    sheet = accelerator_sheet(found, TINY, "fp32", name, "here")
    (tmp_path / f"{NAME}.yaml").write_text(sheet, encoding="utf-8")
    assert device_model(load_accelerator(NAME, tmp_path), "fp32", 4).gemm_s(64, 64, 64) > 0


def _gathers(rank: int, num_ranks: int, device: torch.device) -> Measured:
    return link_seconds(make_comm(Mesh((("all", num_ranks),), rank), [("all",)]), device, TINY.gathered)


def test_a_call_is_the_mean_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, which may compile, is not counted; the others fill half of the budget."""
    now, calls = [0.0], list[float]()

    def function() -> None:
        calls.append(1.0 if not calls else 0.002)
        now[0] += calls[-1]

    monkeypatch.setattr(
        calibrate_gpus,
        "clock",
        lambda device: Clock(lambda: now[0], lambda begin, end: 1e3 * (end - begin)),
    )
    assert calibrate_gpus.call_s(function, torch.device("cpu"), 0.1) == pytest.approx(0.002)
    assert 0.05 <= 0.002 * 32 and len(calls) == 1 + 1 + 2 + 4 + 8 + 16 + 32
