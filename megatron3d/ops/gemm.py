"""GEMM of one device: F.linear, or oneDNN's kernel for fp32 on a CPU.

torch computes fp32 GEMMs with MKL, which on CPUs of other vendors than Intel reaches half of oneDNN's speed (measured
on an AMD EPYC: 108 against 170 to 259 GFLOP/s per core); Inductor calls the same operator.  Both compute in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def uses_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether GEMMs use oneDNN: fp32 on an x86 CPU, where this torch has the operator."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a b^T + bias [M, N], contiguous; without autograd, since oneDNN's operator has no gradient."""
    return _strided(a_MK, b_NK, bias_N).contiguous()


def _strided(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a b^T + bias with any strides; oneDNN copies a strided first operand, so the smaller one goes first."""
    if not uses_onednn(a_MK.device, a_MK.dtype):
        return F.linear(a_MK, b_NK, bias_N)
    if bias_N is None and not a_MK.is_contiguous() and b_NK.numel() < a_MK.numel():
        return _strided(b_NK, a_MK).T
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, bias_N, "none", [], "")
    return y_MN


def add_product(total_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return total + a b^T in fp32 or wider, in place where `total` is that wide."""
    if total_MN.dtype != torch.promote_types(total_MN.dtype, torch.float32):
        total_MN = total_MN.float()
    if _widens(total_MN, a_MK):
        return torch.addmm(total_MN, a_MK, b_NK.T, out_dtype=total_MN.dtype, out=total_MN)
    if total_MN.dtype != a_MK.dtype or uses_onednn(a_MK.device, a_MK.dtype):
        return total_MN.add_(_strided(a_MK, b_NK))
    return total_MN.addmm_(a_MK, b_NK.T)


def put_product(into_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> None:
    """Write a b^T into `into_MN`."""
    if _widens(into_MN, a_MK):
        torch.mm(a_MK, b_NK.T, out_dtype=into_MN.dtype, out=into_MN)
    elif into_MN.dtype != a_MK.dtype or uses_onednn(a_MK.device, a_MK.dtype):
        into_MN.copy_(_strided(a_MK, b_NK))
    else:
        torch.mm(a_MK, b_NK.T, out=into_MN)


def _widens(out: Tensor, a: Tensor) -> bool:
    """Return whether one kernel multiplies bf16 or fp16 operands into an fp32 result, as on GPUs."""
    return a.is_cuda and out.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)
