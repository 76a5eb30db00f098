"""GEMMs of fp8 operands by torch's scaled kernels, and the table of those that a device has.

`torch.nn.functional.scaled_mm` multiplies A [R, S] by B^T [S, T], both stored with the summed dim last, as Hopper wants
them, and applies the scales of their blocks while it sums. Each kind of block has its layout of scales:

    block        scales [row blocks, summed blocks]
    whole        one fp32
    row          one fp32 per row
    1 x 128      fp32, the rows of one block of features side by side
    128 x 128    fp32, the blocks of features side by side, padded to a multiple of 4
    1 x 32       e8m0 in tiles of 128 rows by 4 blocks, row r and block c at 16 (r % 32) + 4 (r // 32) + c

The layouts are cuBLAS's (https://docs.nvidia.com/cuda/cublas, narrow precision data types). Blackwell has no kernel for
blocks of 128; their scales are powers of 2, so that the kernel for 1 x 32 multiplies the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megatron3d.linear.fp8_plan import Blocks, Fp8
from megatron3d.linear.gemm import Form, Operand

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
MX_FEATURES = 32
MX = Blocks(1, MX_FEATURES)
# Features and rows that a kernel takes: 16 bytes.
MULTIPLE = 16


Version = tuple[int, int]


class GemmDevice(NamedTuple):
    """What multiplies: a CPU or GPU in words, its compute capability, and the CUDA that torch was built with."""

    name: str
    capability: Version = (0, 0)
    cuda: Version = (0, 0)


@dataclass(frozen=True)
class ScaledKernel:
    """Kernel of a recipe, and the machines that have it.

    Attributes:
        recipe_name: key of `RECIPES`.
        capabilities: first compute capability, and the first one without it.
        cuda: first version of CUDA.
        has_fp32: returns fp32 as well as bf16.
        takes_e5m2: takes dY in e5m2.
        as_mx: blocks are given as 1 x 32 with powers of 2.
    """

    recipe_name: str
    capabilities: tuple[Version, Version]
    cuda: Version
    has_fp32: bool = True
    takes_e5m2: bool = False
    as_mx: bool = False

    def is_on(self, machine: GemmDevice) -> bool:
        """Return whether a machine has the kernel."""
        first, end = self.capabilities
        return first <= machine.capability < end and machine.cuda >= self.cuda


ADA, HOPPER, BLACKWELL, ANY = (8, 9), (9, 0), (10, 0), (99, 0)
# The first that a machine has is taken. Rowwise is cuBLAS's on Hopper, and elsewhere CUTLASS's, which rounds to bf16.
KERNELS = (
    ScaledKernel("tensorwise", (ADA, ANY), (12, 0), takes_e5m2=True),
    ScaledKernel("rowwise", (HOPPER, BLACKWELL), (12, 9), takes_e5m2=True),
    ScaledKernel("rowwise", (ADA, ANY), (12, 0), has_fp32=False, takes_e5m2=True),
    ScaledKernel("blockwise", (HOPPER, BLACKWELL), (12, 9)),
    ScaledKernel("blockwise", (BLACKWELL, ANY), (12, 8), as_mx=True),
    ScaledKernel("mxfp8", (BLACKWELL, ANY), (12, 8)),
)


def kernel_on(machine: GemmDevice, recipe_name: str) -> ScaledKernel | None:
    """Return the kernel of a recipe on a machine; None if it has none."""
    found = (kernel for kernel in KERNELS if kernel.recipe_name == recipe_name and kernel.is_on(machine))
    return next(found, None)


@cache
def gemm_device(device: torch.device) -> GemmDevice:
    """Return the machine that a device is."""
    if device.type == "cpu" or torch.version.cuda is None:
        return GemmDevice("CPUs" if device.type == "cpu" else f"{device.type} without CUDA")
    capability, (major, minor, *_) = torch.cuda.get_device_capability(device), torch.version.cuda.split(".")
    name = f"GPUs of compute capability {'.'.join(map(str, capability))} with CUDA {major}.{minor}"
    return GemmDevice(name, capability, (int(major), int(minor)))


@cache
def kernel_of(recipe_name: str, device: torch.device, dtype: torch.dtype) -> ScaledKernel | None:
    """Return the kernel of a recipe for values of `dtype` on a device; None: it has none.

    Runs in fp32 and fp64 have none, since they are there for their precision, and neither do CPUs, whose kernels take
    longer than to restore the values and multiply them: 0.19 s instead of 0.02 s for 2048^3 in bf16.
    """
    return kernel_on(gemm_device(device), recipe_name) if dtype == torch.bfloat16 else None


def fits(kernel: ScaledKernel, a: Operand, b: Operand) -> bool:
    """Return whether a kernel takes two operands: their formats, and features and rows in multiples of 16 bytes."""
    formats = a.data.dtype, b.data.dtype
    sizes = (*b.data.shape, a.data.shape[1])
    has_formats = formats == (E4M3, E4M3) or (kernel.takes_e5m2 and formats != (E5M2, E5M2))
    return has_formats and a.data.numel() > 0 and all(size % MULTIPLE == 0 for size in sizes)


def scaled_product(kernel: ScaledKernel, a: Operand, b: Operand, dtype: torch.dtype, is_fast: bool = False) -> Tensor:
    """Return a b^T in `dtype`, or in bf16 where the kernel returns nothing wider.

    Args:
        is_fast: Hopper's tensor cores sum in fewer bits than fp32; others, and kernels of blocks, ignore it.
    """
    scaling_a, swizzle_a, scales_a = arranged(a, kernel.as_mx)
    scaling_b, swizzle_b, scales_b = arranged(b, kernel.as_mx)
    return F.scaled_mm(
        a.data,
        b.data.T,
        scales_a,
        scaling_a,
        _rows(scales_b.T) if scaling_b is ScalingType.RowWise else scales_b,
        scaling_b,
        swizzle_a,
        swizzle_b,
        output_dtype=dtype if kernel.has_fp32 else torch.bfloat16,
        use_fast_accum=is_fast and scaling_a in (ScalingType.TensorWise, ScalingType.RowWise),
    )


def arranged(operand: Operand, as_mx: bool = False) -> tuple[ScalingType, SwizzleType, Tensor]:
    """Return the kind of an operand's blocks, and its scales in the layout that the kernel wants."""
    form, scales = operand.form, operand.scales
    assert form is not None and scales is not None, "the operand is quantized"
    blocks = Blocks(form.rows, form.summed)
    if as_mx:
        blocks, scales = MX, as_mx_scales(scales, form)
    scaling, arrange = _LAYOUTS[blocks]
    swizzle = SwizzleType.SWIZZLE_32_4_4 if blocks == MX else SwizzleType.NO_SWIZZLE
    return scaling, swizzle, arrange(scales)


def as_mx_scales(scales: Tensor, form: Form) -> Tensor:
    """Return scales that are powers of 2, one per block, as one per row and 32 features."""
    assert form.rows is not None and form.summed is not None, "blocks have a size"
    return scales.repeat_interleave(form.rows, 0).repeat_interleave(form.summed // MX_FEATURES, 1).to(E8M0)


def outer_first(scales: Tensor) -> Tensor:
    """Return scales [rows, blocks] with the rows of a block side by side."""
    return _rows(scales.T).T


def padded(scales: Tensor) -> Tensor:
    """Return scales [row blocks, blocks] as [blocks, row blocks], blocks side by side and padded to 16 bytes."""
    return _rows(F.pad(scales, (0, -scales.shape[1] % 4))).T


def _rows(scales: Tensor) -> Tensor:
    """Return scales in the order of memory, and also their strides along dims of size 1, which kernels check."""
    return scales.flatten().view(scales.shape)


def swizzled(scales: Tensor) -> Tensor:
    """Return scales of single bytes [rows, blocks] in tiles of 128 rows by 4 blocks, flat."""
    rows, blocks = scales.shape
    whole = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = whole.view(-1, 4, 32, whole.shape[1] // 4, 4)  # rows of a tile as 4 groups of 32
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


_Layout = Callable[[Tensor], Tensor]
_LAYOUTS: Mapping[Blocks, tuple[ScalingType, _Layout]] = {
    Blocks(None, None): (ScalingType.TensorWise, lambda scales: scales.reshape(())),
    Blocks(1, None): (ScalingType.RowWise, _rows),
    Blocks(1, 128): (ScalingType.BlockWise1x128, outer_first),
    Blocks(128, 128): (ScalingType.BlockWise128x128, padded),
    MX: (ScalingType.BlockWise1x32, swizzled),
}


def describe_fp8(fp8: Fp8, machine: GemmDevice, dtype: torch.dtype) -> str:
    """Return in words which GEMMs of fp8 operands the scaled kernel of a machine computes, and what the others do."""
    what = f"fp8 {fp8.recipe_name}, {fp8.formats_name}"
    wide = dtype if fp8.recipe.has_powers and dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)
    restored = f"restored to {str(wide)[6:]} and multiplied"
    kernel = kernel_on(machine, fp8.recipe_name) if dtype == torch.bfloat16 else None
    if kernel is None:
        return f"{what}: {restored}; there is no scaled GEMM for it with {str(dtype)[6:]} on {machine.name}"
    name = "torch's scaled GEMM of 1 x 32 blocks" if kernel.as_mx else "torch's scaled GEMM"
    if fp8.formats.dy == "e5m2" and not kernel.takes_e5m2:
        return f"{what}: Y by {name}; dX and dW {restored}, since that takes e4m3 alone"
    return f"{what}: {name}"
