"""Fact: a GEMM takes as long as its waves of tiles or its memory traffic, and never less than the peak allows.

Every file of `hardware/` can be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.errors import UserError
from megatron3d.forecast.time.hardware import (
    CLUSTERS,
    FOLDER,
    DeviceModel,
    device_model,
    file_names,
    load_accelerator,
    load_cluster,
)

A100 = device_model(load_accelerator("a100"), "bf16", 2)
sizes = st.integers(1, 20_000)


@given(m=sizes, n=sizes, k=sizes)
def test_no_gemm_is_faster_than_the_peak(m: int, n: int, k: int) -> None:
    seconds = A100.gemm_s(m, n, k)
    assert seconds >= 2 * m * n * k / (A100.peak * A100.kernels.matmul_fraction)
    assert seconds >= 2 * (m * k + k * n + m * n) / A100.kernels.bytes_per_s
    assert seconds >= 4e-6


@given(m=sizes, n=sizes, k=sizes, more=st.integers(0, 5000))
def test_a_larger_gemm_takes_no_less_time(m: int, n: int, k: int, more: int) -> None:
    seconds = A100.gemm_s(m, n, k)
    for larger in ((m + more, n, k), (m, n + more, k), (m, n, k + more)):
        assert A100.gemm_s(*larger) >= seconds


def test_large_gemms_reach_the_sustained_rate() -> None:
    """A GEMM of 16384 cubed is within 3 % of the sustained rate, a thin one of equal FLOPs far below it."""
    flops = 2 * 16384**3
    assert flops / A100.gemm_s(16384, 16384, 16384) == pytest.approx(0.8 * 312e12, rel=0.03)
    assert flops / A100.gemm_s(128, 16384 * 128, 16384) < 0.7 * 312e12


@pytest.mark.parametrize("channels", [108, 150])
def test_batched_gemms_of_unaligned_rows_do_without_tensor_cores(channels: int) -> None:
    """Scores of heads of 108 channels, which are 216 bytes, are computed at A100's 19.5 TFLOP/s at most."""
    aligned = 16 * (channels // 16)
    for sizes, near in (
        ((2048, 2048, channels), (2048, 2048, aligned)),
        ((2048, channels, 2048), (2048, aligned, 2048)),
    ):
        seconds = A100.gemm_s(*sizes, 64)
        assert 2 * 64 * 2048**2 * channels / seconds < 19.5e12
        assert seconds > 5 * A100.gemm_s(*near, 64)
        assert A100.gemm_s(*sizes) < 2 * A100.gemm_s(*near), "a single GEMM loads narrower, and keeps Tensor Cores"


def test_one_more_row_of_tiles_needs_a_second_wave() -> None:
    """One row of tiles more than the multiprocessors compute concurrently needs a second wave."""
    rows, columns = 12 * 256, 9 * 128  # 108 units
    assert A100.gemm_s(rows + 256, columns, 4096) > 1.3 * A100.gemm_s(rows, columns, 4096)


def test_a_cpu_adds_the_launch_time_of_a_kernel() -> None:
    kernels = A100.kernels.model_copy(update={"adds_launch": True, "launch_us": 100.0})
    slow = DeviceModel(kernels, A100.peak, A100.plain_peak, 2, slowdown=2.0)
    assert slow.memory_bound_s(1e9) == pytest.approx(2 * (100e-6 + A100.memory_bound_s(1e9)))
    assert slow.memory_bound_s(0) == 0


@pytest.mark.parametrize("name", file_names(CLUSTERS))
def test_clusters_name_an_accelerator_with_kernels(name: str) -> None:
    cluster = load_cluster(name)
    assert load_accelerator(cluster.accelerator).kernels
    assert [level.ranks for level in cluster.levels] == sorted(level.ranks for level in cluster.levels)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_level_is_explained(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    levels = [index for index, line in enumerate(lines) if line.startswith("  - ")]
    assert levels and all(lines[index - 1].lstrip().startswith("#") for index in levels)


@pytest.mark.parametrize(
    "name", [name for name in file_names(FOLDER) if "kernels:" in (FOLDER / f"{name}.yaml").read_text()]
)
def test_every_constant_is_explained(name: str) -> None:
    _, _, kernels = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("kernels:\n")
    lines = kernels.partition("measured:\n")[0].rstrip().splitlines()
    values = [index for index, line in enumerate(lines) if not line.lstrip().startswith("#")]
    assert values and all(lines[index - 1].lstrip().startswith("#") for index in values)


def test_a_missing_cluster_is_reported() -> None:
    with pytest.raises(UserError, match=r"there is none; use .*dgx_h200, eos"):
        load_cluster("nowhere")
    with pytest.raises(UserError, match="l4: only its peak is known"):
        load_accelerator("l4")
    with pytest.raises(UserError, match=r"train\.precision=fp8"):
        device_model(load_accelerator("a100"), "fp8", 1)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\naccelerator: a100\nlevels: []\nsource: me\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine.yaml: levels: Tuple should have at least 1 item"):
        load_cluster(str(tmp_path / "mine.yaml"))
