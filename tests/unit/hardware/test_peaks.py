"""Fact: MFU is relative to a dense peak with a named source: data sheet, user, or measurement."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
import yaml

from megatron3d.hardware import devices as peaks

SHEETS = {path.name: path for path in files("megatron3d.hardware").iterdir() if path.name.endswith(".yaml")}


@pytest.mark.parametrize("name", SHEETS)
def test_every_number_of_a_sheet_has_a_source_and_is_dense(name: str) -> None:
    sheet = yaml.safe_load(SHEETS[name].read_text())
    assert set(sheet) - {"kernels", "measured"} == {"device_names", "peak_tflops", "capability", "source"}
    assert len(sheet["source"]) > 20
    dense = sheet["peak_tflops"]
    assert set(dense) <= {"fp64", "fp32", "bf16", "fp16", "fp8"}
    assert dense.get("fp64", 0) <= dense["fp32"] <= dense["fp16"] <= 2500
    has_fp8 = sheet["capability"] >= [8, 9]
    assert dense.get("fp8", 0) == (pytest.approx(2 * dense["fp16"], rel=0.005) if has_fp8 else 0)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
    ],
)
def test_peaks_by_the_whole_device_name(name: str, precision: str, tflops: float | None) -> None:
    peak = peaks.published_peak(name, precision)
    assert (peak and peak.flops) == (tflops and pytest.approx(tflops * 1e12))


def test_a_configured_peak_comes_first() -> None:
    peak = peaks.device_peak(torch.device("cpu"), "fp32", peak_tflops=2.5)
    assert peak == peaks.Peak(2.5e12, "logging.peak_tflops")


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_cpu_is_measured_in_the_precision_of_the_run(precision: str) -> None:
    peak = peaks.measured_peak(precision, budget_s=0.01, size=64)
    assert 1e6 < peak.flops < 1e15
    assert precision in peak.source
    assert f"{torch.get_num_threads()} thread" in peak.source


def test_an_unknown_peak_is_reported_with_instructions() -> None:
    device = torch.device("cpu")
    assert "set logging.peak_tflops" in peaks.describe_peak(None, device, "fp32")
    assert "2.5 TFLOP/s per device (me)" in peaks.describe_peak(peaks.Peak(2.5e12, "me"), device, "fp32")
