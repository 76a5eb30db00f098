"""Peak FLOP/s of a device, the denominator of MFU, and the attention kernel that a run gets, as torch reports it.

There is one YAML per accelerator: a regular expression for the device name that the driver reports, the dense peak per
precision in TFLOP/s (never the doubled peak of structured sparsity), and the published source of these numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product

import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron3d.linear import gemm

_CPU_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, and the source of that number; an estimate may be exceeded."""

    flops: float
    source: str
    is_estimate: bool = False


def device_name(device: torch.device) -> str:
    """Return the device name that the driver reports, or `CPU`."""
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def device_peak(device: torch.device, precision: str, peak_tflops: float | None = None) -> Peak | None:
    """Return the peak of one device in a training precision; None if it is not known.

    Args:
        peak_tflops: dense TFLOP/s from `logging.peak_tflops`, which overrides published and measured peaks.
    """
    if peak_tflops is not None:
        return Peak(peak_tflops * 1e12, "logging.peak_tflops")
    if device.type == "cpu":
        return measured_peak(precision)
    return published_peak(device_name(device), precision)


def published_peak(name: str, precision: str) -> Peak | None:
    """Return the dense peak of an accelerator from its data sheet; None if there is no sheet with this precision."""
    for path in files("megatron3d.hardware").iterdir():
        if path.name.endswith(".yaml"):
            sheet = yaml.safe_load(path.read_text(encoding="utf-8"))
            if re.fullmatch(sheet["device_names"], name) and precision in sheet["peak_tflops"]:
                return Peak(sheet["peak_tflops"][precision] * 1e12, sheet["source"])
    return None


def measured_peak(precision: str, budget_s: float = 0.4, size: int = 512) -> Peak:
    """Return an estimate of the CPU's peak, with the threads of this run.

    It is the fastest of many square matmuls of two sizes, by our kernel and torch's in turns; other load slows some.
    """
    threads = f"{torch.get_num_threads()} thread(s)"
    source = f"an estimate: the fastest of {size} and {2 * size} square matmuls in {precision} with {threads}"
    operands = [torch.ones(each, each, dtype=_CPU_DTYPES[precision]) for each in (size, 2 * size)]
    kernels: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (gemm.product, torch.mm)
    best, end = 0.0, time.perf_counter() + budget_s
    while time.perf_counter() < end:
        for a, multiply in product(operands, kernels):
            begin = time.perf_counter()
            multiply(a, a)
            best = max(best, 2 * len(a) ** 3 / (time.perf_counter() - begin))
    return Peak(best, source, is_estimate=True)


def corrected_peak(peak: Peak, reached_flops: float, precision: str) -> Peak:
    """Return an estimate that was exceeded, measured again; at least `reached_flops` [FLOP/s].

    Published and configured peaks stay: to exceed one is an error in it, which MFU above 1 shows.
    """
    if not peak.is_estimate or reached_flops <= peak.flops:
        return peak
    again = measured_peak(precision)
    return replace(again, flops=max(again.flops, reached_flops))


def describe_peak(peak: Peak | None, device: torch.device, precision: str, has_fp8: bool = False) -> str:
    """Return the line of the start-up report about the peak; `has_fp8`: some linears multiply in fp8."""
    if peak is None:
        remedy = "set logging.peak_tflops to its dense TFLOP/s per device"
        return f"MFU is not reported: the peak of {device_name(device)} in {precision} is not known; {remedy}"
    which = f" in {precision}, fp8 or not," if has_fp8 else ""
    return f"MFU is relative to {peak.flops / 1e12:.4g} TFLOP/s{which} per device ({peak.source})"


NAMES: Mapping[SDPBackend, str] = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "math",
    SDPBackend.OVERRIDEABLE: "the device's own",
}


def describe_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    seq_length: int,
    dropout: float = 0.0,
    packed: str | None = None,
) -> str:
    """Return the line of the start-up report about the attention kernel.

    Args:
        heads: query heads and key/value heads of one rank, and the size of a head.
        dropout: rate of dropout on the attention weights; if it is not 0, training does not use these kernels.
        packed: kernel within documents and windows; None: each query sees all before it.
    """
    num_heads, num_groups, size = heads
    q, k = (
        torch.empty(1, seq_length, n, size, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)
        for n in (num_heads, num_groups)
    )
    groups = "" if num_groups == num_heads else f" ({num_groups} key/value)"
    what = f"{num_heads} heads{groups} of {size} in {str(dtype).removeprefix('torch.')} on each rank"
    line = f"{chosen(q, k)} kernel for {what} (usable: {', '.join(usable(q, k))})"
    if packed is not None:
        line = f"{line}; within documents and windows {packed}"
    if dropout > 0:
        return f"attention: plain matmuls in training, since attention_dropout={dropout:g}; in evaluation {line}"
    return f"attention: {line}"


def chosen(q: Tensor, k: Tensor, mask: Tensor | None = None) -> str:
    """Return the kernel that torch chooses for causal or masked attention of `q` and `k` [B, heads, S, D]."""
    is_grouped = q.shape[1] != k.shape[1]
    backend: int = torch._fused_sdp_choice(q, k, k, mask, is_causal=mask is None, enable_gqa=is_grouped)
    return NAMES[SDPBackend(backend)]


def usable(q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[str, ...]:
    """Return the enabled kernels that support causal or masked attention of `q` and `k` [B, heads, S, D]."""
    flags = torch.backends.cuda
    math = flags.math_sdp_enabled()
    if q.device.type == "cpu":
        able = {SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(), SDPBackend.MATH: math}
    else:
        params = flags.SDPAParams(q, k, k, mask, 0.0, mask is None, q.shape[1] != k.shape[1])
        able = {
            SDPBackend.FLASH_ATTENTION: flags.can_use_flash_attention(params),
            SDPBackend.EFFICIENT_ATTENTION: flags.can_use_efficient_attention(params),
            SDPBackend.CUDNN_ATTENTION: flags.can_use_cudnn_attention(params),
            SDPBackend.MATH: math,
        }
    return tuple(NAMES[backend] for backend, is_able in able.items() if is_able)
