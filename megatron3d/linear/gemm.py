"""GEMMs of a linear: a table of recipes, each of which multiplies in three roles.

    y   Y = X W^T + bias     forward
    dx  dX = dY W            dgrad, the input gradient
    dw  dW = dY^T X          wgrad, the weight gradient, or accumulated in main_grad

A recipe says as what an operand is stored (`Operand`): collectives move operands, and backward keeps them.  `native`
multiplies tensors as they are, with torch's kernel, or oneDNN's for fp32 on CPUs where that is faster; `reference` is
the slow, obvious form of it in float64.

torch computes fp32 GEMMs with MKL, whose AVX-512 kernels run on Intel only; on AMD it uses AVX2.  Zen 5 executes twice
as many AVX-512 operations per cycle: oneDNN's kernel reaches 170 to 259 GFLOP/s per core where MKL's reaches 108.  On
Zen 4 oneDNN is 10 % faster (105 against 95), and slower where it must copy transposed operands, as for dW (80 against
90).  On Intel MKL is faster.  The kernel follows from the CPU's model alone, so that every rank and every resumed run
rounds alike.  Inductor calls the same operator of oneDNN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.linear.overlap_plan import Direction

CPU_INFO = Path("/proc/cpuinfo")
ZEN_5 = 26  # AMD's family number; 23 and 25 are Zen 1 to 4


def onednn_rule(cpu_info: str) -> tuple[str, Callable[[Tensor], bool]]:
    """Return which fp32 GEMMs oneDNN computes on the CPU of a `/proc/cpuinfo`: in words, and by the first operand."""
    vendor, family = (re.search(rf"^{key}\s*: (\S+)$", cpu_info, re.M) for key in ("vendor_id", "cpu family"))
    if not vendor or vendor[1] != "AuthenticAMD" or not family:
        return "none", lambda a_MK: False
    if int(family[1]) >= ZEN_5:
        return "all", lambda a_MK: True
    return "Y and dX, not dW", lambda a_MK: a_MK.is_contiguous()


@cache
def _rule_of_this_cpu() -> tuple[str, Callable[[Tensor], bool]]:
    usable = (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and CPU_INFO.exists()
    )
    return onednn_rule(CPU_INFO.read_text(encoding="utf-8") if usable else "")


def onednn_gemms(device: torch.device, dtype: torch.dtype) -> str:
    """Return in words which GEMMs of a device and dtype oneDNN computes: "none", "all", or some."""
    return _rule_of_this_cpu()[0] if device.type == "cpu" and dtype == torch.float32 else "none"


def uses_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes any GEMM of this device and dtype."""
    return onednn_gemms(device, dtype) != "none"


def _takes_onednn(a_MK: Tensor) -> bool:
    return a_MK.dtype == torch.float32 and a_MK.device.type == "cpu" and _rule_of_this_cpu()[1](a_MK)


def is_compiled_by_shape(a_MK: Tensor) -> bool:
    """Return whether products of this first operand are oneDNN's, which compiles a kernel for each shape."""
    return a_MK.device.type == "cpu" and (a_MK.dtype.itemsize < 4 or _takes_onednn(a_MK))


def product(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a b^T + bias [M, N], contiguous; without autograd, since oneDNN's operator has no gradient."""
    return _strided(a_MK, b_NK, bias_N).contiguous()


def _strided(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return a b^T + bias with any strides; oneDNN copies a strided first operand, so the smaller one goes first."""
    if not _takes_onednn(a_MK):
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
    if total_MN.dtype != a_MK.dtype or _takes_onednn(a_MK):
        return total_MN.add_(_strided(a_MK, b_NK))
    return total_MN.addmm_(a_MK, b_NK.T)


def put_product(into_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> None:
    """Write a b^T into `into_MN`."""
    if _widens(into_MN, a_MK):
        torch.mm(a_MK, b_NK.T, out_dtype=into_MN.dtype, out=into_MN)
    elif into_MN.dtype != a_MK.dtype or _takes_onednn(a_MK):
        into_MN.copy_(_strided(a_MK, b_NK))
    else:
        torch.mm(a_MK, b_NK.T, out=into_MN)


def _widens(out: Tensor, a: Tensor) -> bool:
    """Return whether one kernel multiplies bf16 or fp16 operands into an fp32 result, as on GPUs."""
    return a.is_cuda and out.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """How an operand is stored that is not its values: in blocks of `rows` by `summed` elements, with a scale each.

    Attributes:
        rows, summed: size of a block along the rows and along the dim that is summed; None: it has all of the dim.
        dtype: dtype of the values.
        is_transposed: `data` is the transposed tensor, whose rows are the tensor's columns.
    """

    rows: int | None
    summed: int | None
    dtype: torch.dtype
    is_transposed: bool = False


@dataclass(slots=True)  # five of them per linear and step: a NamedTuple takes twice as long to make
class Operand:
    """Operand of a GEMM as collectives move it and backward keeps it.

    Attributes:
        data: the values, or what a recipe stores in their place.
        scales: factors of blocks of `data`, one per block; None: `data` are the values.
        form: how `data` and `scales` are stored; None: as the values are, element by element.
        turned: the operand of the transposed tensor, where it was made in the same pass.
    """

    data: Tensor
    scales: Tensor | None = None
    form: Form | None = None
    turned: Operand | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return self.data.dtype if self.form is None else self.form.dtype


Kept = tuple[Tensor | None, ...]
# Data and scales of a tensor for the GEMM that sums its columns, and for the one that sums its rows, not transposed.
Forms = tuple[Tensor, Tensor, Tensor, Tensor]


class Traceable(Protocol):
    """How a recipe makes operands with torch's operations alone, so that a compiled graph fuses them with others.

    Attributes:
        scale_bytes: size of a stored scale.
    """

    @property
    def scale_bytes(self) -> int: ...

    def x(self, x_MK: Tensor) -> Forms:
        """Return X for Y and for dW."""
        ...

    def dy(self, dy_MN: Tensor) -> Forms:
        """Return dY for dX and for dW."""
        ...


class Gemm:
    """How a linear multiplies: X [M, K], W [N, K] and dY [M, N] as operands, results as tensors.

    This recipe multiplies tensors as they are, in their own dtype; others override its methods.

    Attributes:
        traceable: makes operands inside compiled graphs; None: linears there are given tensors.
    """

    traceable: Traceable | None = None

    def traced(self, data: Tensor, scales: Tensor, dtype: torch.dtype, *, is_transposed: bool = False) -> Operand:
        """Return the operand of data and scales that `traceable` made of values of `dtype`, or of their transposes."""
        raise AssertionError("the recipe makes no operands inside compiled graphs")

    def x(self, x_MK: Tensor, is_kept: bool = False) -> Operand:
        """Return X, or a shard of it, as it is gathered and multiplied for Y; `is_kept`: `keep` is called next."""
        return Operand(x_MK)

    def w(self, w_NK: Tensor, at: Direction = Direction.FORWARD) -> Operand:
        """Return W, or a shard of it, as it is gathered and multiplied for Y, or in backward for dX."""
        return Operand(w_NK)

    def w_of(self, w_ENK: Tensor, expert: int, at: Direction = Direction.FORWARD) -> Operand:
        """Return W of one of the experts."""
        return self.w(w_ENK[expert], at)

    def show_experts(self, w_ENK: Tensor) -> None:
        """Show W of all experts to what watches the operands, also those that have no rows."""

    def dy(self, dy_MN: Tensor) -> Operand:
        """Return dY, or a shard of it, as it is gathered."""
        return Operand(dy_MN)

    def gathered(self, dy: Operand) -> tuple[Operand, Operand]:
        """Return the gathered dY as it is multiplied for dX, and for dW."""
        return dy, dy

    def keep(self, x_MK: Tensor, x: Operand, w_NK: Tensor) -> Kept:
        """Return what forward keeps of the shards for backward; `x` is the operand of X."""
        return x.data, w_NK

    def kept(self, saved: Kept) -> tuple[Operand, Tensor]:
        """Return the shard of X as it is gathered and multiplied for dW, and that of W, from what `keep` returned."""
        x_MK, w_NK = saved
        assert x_MK is not None and w_NK is not None, "both shards are kept"
        return Operand(x_MK), w_NK

    def packed(self, x_MK: Tensor) -> Tensor | None:
        """Return whole rows of X as bytes [M, C] that are sent in their place; None: they are sent as they are."""
        return None

    def unpacked(self, packed_MC: Tensor, x_MK: Tensor) -> Operand:
        """Return rows that came as bytes as they are multiplied for Y; `x_MK` has their sizes and dtype alone."""
        raise AssertionError("rows of this recipe are sent as they are")

    def y(self, x: Operand, w: Operand, bias_N: Tensor | None = None, into_MN: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + bias [M, N], written into `into_MN` where that is given, without a bias."""
        if into_MN is None:
            return product(x.data, w.data, bias_N)
        put_product(into_MN, x.data, w.data)
        return into_MN

    def dx(self, dy: Operand, w: Operand, into_MK: Tensor | None = None) -> Tensor:
        """Return dX = dY W [M, K], written into `into_MK` where that is given."""
        if into_MK is not None:
            put_product(into_MK, dy.data, w.data.T)
            return into_MK
        return product(dy.data, w.data.T) if _takes_onednn(dy.data) else torch.mm(dy.data, w.data)

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        """Return dW = dY^T X [N, K] in `dtype`, without rounding to the operands' dtype where one kernel does so."""
        if dy.data.is_cuda and dtype == torch.float32 and dy.data.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(dy.data.T, x.data, out_dtype=dtype)
        return product(dy.data.T, x.data.T).to(dtype)

    def dw_into(self, main_grad_NK: Tensor, dy: Operand, x: Operand, holds_gradient: bool) -> None:
        """Add dW = dY^T X to main_grad, or write it there where main_grad holds no gradient of this step."""
        (add_product if holds_gradient else put_product)(main_grad_NK, dy.data.T, x.data.T)


class ReferenceGemm(Gemm):
    """GEMM in float64 whose results are rounded once, to hold the other recipes against."""

    def y(self, x: Operand, w: Operand, bias_N: Tensor | None = None, into_MN: Tensor | None = None) -> Tensor:
        y_MN = x.data.double() @ w.data.double().T
        y_MN = (y_MN if bias_N is None else y_MN + bias_N.double()).to(x.data.dtype)
        return y_MN if into_MN is None else into_MN.copy_(y_MN)

    def dx(self, dy: Operand, w: Operand, into_MK: Tensor | None = None) -> Tensor:
        dx_MK = (dy.data.double() @ w.data.double()).to(dy.data.dtype)
        return dx_MK if into_MK is None else into_MK.copy_(dx_MK)

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return (dy.data.double().T @ x.data.double()).to(dtype)

    def dw_into(self, main_grad_NK: Tensor, dy: Operand, x: Operand, holds_gradient: bool) -> None:
        dw_NK = self.dw(dy, x, torch.float64)
        main_grad_NK.copy_(main_grad_NK.double() + dw_NK if holds_gradient else dw_NK)


NATIVE = Gemm()
GEMMS: Mapping[str, Gemm] = {"native": NATIVE, "reference": ReferenceGemm()}
