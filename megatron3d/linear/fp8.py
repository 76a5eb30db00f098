"""GEMMs of fp8 operands: quantization of global blocks, and the three roles of a linear.

Kernels take both operands with the dim that they sum last, which is another one in each role.  So an operand has two
forms, and blocks of each run along the summed dim:

    Y  = X W^T    X [M, K] and W [N, K] along K
    dX = dY W     dY [M, N] and W^T [K, N] along N
    dW = dY^T X   dY^T [N, M] and X^T [K, M] along M; X^T is what backward keeps of X

Where blocks are as wide as high, the second form is the first one transposed.  dY of blockwise is quantized along N and
all-gathered so; its form along M is made of these values, which lose nothing by another power of 2 but underflow.

Quantization is a function of the global tensor (`fp8_plan.py`), so that every layout quantizes to the same bits, before
or after an all-gather.

Letters: M tokens, K input features, N output features; R rows and S summed features of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.linear.fp8_plan import Blocks, Fp8, reduced_axes
from megatron3d.linear.gemm import NATIVE, Form, Forms, Gemm, Kept, Operand
from megatron3d.linear.overlap_plan import Direction
from megatron3d.linear.scaled_mm import E4M3, E5M2, E8M0, ScaledKernel, fits, kernel_of, scaled_product
from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.runtime.machine import has_triton

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
SCALE_DTYPES = {4: torch.float32, 1: E8M0}  # by their bytes
# Smallest largest value of a block: below it all of the block's values are 0 in fp8, and its scale is still finite.
SMALLEST = 2.0**-110
# Both formats end at 1.75 * 2^n: 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15.
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
_BIAS, _MANTISSA_BITS, _MANTISSA_OF_1_75 = 127, 23, 0x600000
# How far an fp8 element, whose sign an int16 repeats to the left, is shifted to be one of fp16; the bits that stay; by
# how much it is then too small.
_FP16_SHIFTS = {E4M3: (7, ~(1 << 14), 2.0**8), E5M2: (8, ~0, 1.0)}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of values
# Called with X, W or dY, its tensor, and the operand made of it for Y or dX.
OperandHook = Callable[[str, Tensor, Operand], None]


def scales_of(largest: Tensor, fp8: torch.dtype, has_powers: bool) -> tuple[Tensor, Tensor]:
    """Return the factors by which values are multiplied before they are rounded to `fp8`, and those that restore them.

    Args:
        largest: largest absolute value of each block, fp32; where it is not finite, values are restored as NaN, since
            fp8 has no infinity.
        has_powers: factors are rounded down to powers of 2.  They are found from the bits of `largest`, so that every
            compiler and device finds the same.
    """
    bounded = largest.clamp(min=SMALLEST)
    if has_powers:
        bits = bounded.view(torch.int32)
        exceeds = (bits & (2**_MANTISSA_BITS - 1)) > _MANTISSA_OF_1_75
        exponent = LARGEST_EXPONENT[fp8] - ((bits >> _MANTISSA_BITS) - _BIAS) - exceeds.to(torch.int32)
        factor, inverse = (((_BIAS + e) << _MANTISSA_BITS).view(torch.float32) for e in (exponent, -exponent))
    else:
        factor = (torch.finfo(fp8).max / bounded.double()).float()
        inverse = factor.reciprocal()
    return factor, torch.where(largest.isfinite(), inverse, torch.nan)


def largest_of_blocks(t_RS: Tensor, blocks: Blocks) -> Tensor:
    """Return the largest absolute value of each block of this rank's tensor, fp32.

    Bits without the sign are in the order of absolute values, NaN last; CPUs compare them much faster than bf16.
    """
    bits = _INTEGERS[t_RS.dtype.itemsize]
    sizes = t_RS.view(bits).bitwise_and(torch.iinfo(bits).max)
    return _by_block(sizes, blocks).amax((1, 3)).view(t_RS.dtype).float()


def _by_block(t_RS: Tensor, blocks: Blocks) -> Tensor:
    """Return [row blocks, rows, summed blocks, summed] of a tensor."""
    rows, summed = (whole if size is None else size for size, whole in zip(blocks, t_RS.shape, strict=True))
    in_blocks: Tensor = t_RS.unflatten(1, (-1, summed)).unflatten(0, (-1, rows))
    return in_blocks


def round_to_fp8(t_RS: Tensor, factor: Tensor, blocks: Blocks, fp8: torch.dtype, has_powers: bool = False) -> Tensor:
    """Return the values of a tensor times the factor of their block, rounded to `fp8`.

    Args:
        has_powers: factors are powers of 2, by which bf16 is multiplied without rounding.
    """
    is_exact = has_powers and t_RS.dtype == torch.bfloat16
    values, factor = (t_RS, factor.to(t_RS.dtype)) if is_exact else (t_RS.float(), factor)
    scaled = _by_block(values, blocks) * factor[:, None, :, None]
    bound = torch.finfo(fp8).max
    return (scaled if has_powers else scaled.clamp_(-bound, bound)).to(fp8).reshape(t_RS.shape)


def dequantized(operand: Operand, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of an operand in its form, in `dtype`; by default in that of the values before, or wider."""
    form = operand.form
    assert form is not None and operand.scales is not None, "the operand is not quantized"
    dtype = dtype or torch.promote_types(form.dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    values, unit = _widened(operand.data, wide)
    scales = operand.scales.to(torch.float32).to(wide) * unit
    _by_block(values, Blocks(form.rows, form.summed)).mul_(scales[:, None, :, None])
    return values.to(dtype)


def quantized(
    t: Tensor, blocks: Blocks, fp8: torch.dtype, has_powers: bool, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a tensor as fp8, and the factors in fp32 that restore it; `largest`: of its blocks, where these go on."""
    factor, inverse = scales_of(largest_of_blocks(t, blocks) if largest is None else largest, fp8, has_powers)
    return round_to_fp8(t, factor, blocks, fp8, has_powers), inverse


class TraceableFp8(NamedTuple):
    """Operands of a linear whose blocks have no axes, inside compiled graphs.

    Attributes:
        blocks: of X and dY; fp8, dy_fp8: their formats; has_powers: scales are powers of 2.
        requantizes_dy: the form of dY for dW is made of the values of the other one; scale_bytes: of a stored scale.
    """

    blocks: Blocks
    fp8: torch.dtype
    dy_fp8: torch.dtype
    has_powers: bool
    requantizes_dy: bool
    scale_bytes: int

    def x(self, x_MK: Tensor) -> Forms:
        """Return X for Y and for dW."""
        data, scales = quantized(x_MK, self.blocks, self.fp8, self.has_powers)
        return data, scales, *self._along_rows(x_MK, data, scales)

    def dy(self, dy_MN: Tensor) -> Forms:
        """Return dY for dX and for dW."""
        data, scales = quantized(dy_MN, self.blocks, self.dy_fp8, self.has_powers)
        if self.requantizes_dy:
            operand = Operand(data, scales, _form(self.blocks, dy_MN.dtype, is_transposed=False))
            dy_MN = dequantized(operand, restored_dtype(dy_MN.dtype, self.has_powers))
        return data, scales, *self._along_rows(dy_MN, data, scales)

    def _along_rows(self, t: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the second form of a tensor, of which `data` and `scales` are the first."""
        if self.blocks.is_square:
            return data, scales
        return quantized(t, self.blocks.transposed, data.dtype, self.has_powers)


def restored_dtype(dtype: torch.dtype, has_powers: bool) -> torch.dtype:
    """Return the dtype in which fp8 values are restored: bf16 where the network's is and holds them, else wider."""
    is_exact = has_powers and dtype == torch.bfloat16
    return dtype if is_exact else torch.promote_types(dtype, torch.float32)


def _widened(data: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return fp8 values as values of fp32 or wider, and the power of 2 by which these are to be multiplied.

    CPUs convert fp8 slowly: 19 ms for 4 million elements, and 2 ms by way of fp16, which has e5m2's exponent and one
    bit more than e4m3's, so that an element is shifted into place.  NaN may become a number, but its scale is NaN.
    """
    if data.device.type != "cpu":
        return data.to(dtype), 1.0
    shift, mask, unit = _FP16_SHIFTS[data.dtype]
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(mask)
    return bits.view(torch.float16).to(dtype), unit


class Fp8Gemm(Gemm):
    """GEMM of one linear with fp8 operands.

    Args:
        plan: plan of the linear, without axes of size 1; `comm` reduces largest values over its axes.
        kernel_of: returns the scaled kernel of a recipe, device and dtype; None: values are restored and multiplied.
    """

    def __init__(
        self,
        fp8: Fp8,
        plan: MatmulPlan,
        comm: Comm,
        kernel_of: Callable[[str, torch.device, torch.dtype], ScaledKernel | None] = kernel_of,
    ) -> None:
        self.recipe_name, self.recipe, self.plan, self.comm = fp8.recipe_name, fp8.recipe, plan, comm
        self.kernel_of = kernel_of
        self.format, self.dy_format = (DTYPES[name] for name in fp8.formats)
        requantizes_dy = self.recipe.sends_dy and not self.recipe.x.is_square
        self.traceable = TraceableFp8(
            self.recipe.x, self.format, self.dy_format, self.recipe.has_powers, requantizes_dy, self.recipe.scale_bytes
        )
        self.scale_dtype = SCALE_DTYPES[fp8.recipe.scale_bytes]
        self._stored: tuple[Tensor, torch.dtype] | None = None
        self._hook: OperandHook | None = None

    def watch(self, hook: OperandHook | None) -> None:
        """Call `hook` with each operand that is quantized outside compiled graphs, in its first form."""
        self._hook = hook

    def hold_scales(self, scales: Tensor, dtype: torch.dtype) -> None:
        """Take the parameter as W in fp8 from now on, with these scales, of values of `dtype`."""
        assert self.recipe.w.is_square, "W^T is quantized from the values of W, which are not stored"
        self._stored = scales, dtype

    def traced(self, data: Tensor, scales: Tensor, dtype: torch.dtype, *, is_transposed: bool = False) -> Operand:
        scales = scales.to(self.scale_dtype)
        form = _form(self.recipe.x, dtype, is_transposed=is_transposed)
        if is_transposed:  # copied: what an operator returns must not be its input, as transposes of one row would be
            data, scales = (t.T.clone(memory_format=torch.contiguous_format) for t in (data, scales))
        return Operand(data, scales, form)

    def x(self, x_MK: Tensor, is_kept: bool = False) -> Operand:
        if is_kept and self.fuses(x_MK):
            straight, straight.turned = self._fused(x_MK, self.recipe.x, self.format)
        else:
            straight = self._quantized(x_MK, self.recipe.x, self.format, self.plan.x_layout)
        return self._watched("X", x_MK, straight)

    def w(self, w_NK: Tensor, at: Direction = Direction.FORWARD) -> Operand:
        if self._stored is not None:
            return self._restored_w(w_NK, self._stored[0], at)
        if at is Direction.FORWARD:
            return self._watched("W", w_NK, self._quantized(w_NK, self.recipe.w, self.format, self.plan.w_layout))
        return self._quantized(w_NK, self.recipe.w, self.format, self.plan.w_layout, transposes=True)

    def dy(self, dy_MN: Tensor) -> Operand:
        if not self.recipe.sends_dy:
            return Operand(dy_MN)
        return self._watched("dY", dy_MN, self._quantized(dy_MN, self.recipe.x, self.dy_format, self.plan.y_layout))

    def keep(self, x_MK: Tensor, x: Operand, w_NK: Tensor) -> Kept:
        of_dw = x.turned or self._along_m(x, x_MK, self.plan.x_layout)
        return of_dw.data, of_dw.scales, w_NK

    def kept(self, saved: Kept) -> tuple[Operand, Tensor]:
        data_KM, scales, w_NK = saved
        assert data_KM is not None and scales is not None and w_NK is not None, "all are kept"
        form = _form(self.recipe.x, self._dtype(w_NK), is_transposed=True)
        return Operand(data_KM, scales.view(self.scale_dtype), form), w_NK

    def gathered(self, dy: Operand) -> tuple[Operand, Operand]:
        layout: Layout = self.plan.m, self.plan.n
        if dy.form is None and self.fuses(dy.data):
            along_n, along_m = self._fused(dy.data, self.recipe.x, self.dy_format)
            return self._watched("dY", dy.data, along_n), along_m
        if dy.form is None:
            along_n = self._quantized(dy.data, self.recipe.x, self.dy_format, layout)
            self._watched("dY", dy.data, along_n)
            return along_n, self._quantized(dy.data, self.recipe.x, self.dy_format, layout, transposes=True)
        return dy, self._along_m(dy, None, layout)

    def y(self, x: Operand, w: Operand, bias_N: Tensor | None = None, into_MN: Tensor | None = None) -> Tensor:
        y_MN = self._scaled(x, w, x.dtype, is_fast=True)
        if y_MN is None:
            values = self._values(x)
            bias_N = None if bias_N is None else bias_N.to(values.dtype)
            y_MN = NATIVE.y(values, self._values(w), bias_N).to(x.dtype)
        elif bias_N is not None:
            y_MN.add_(bias_N)
        return y_MN if into_MN is None else into_MN.copy_(y_MN)

    def dx(self, dy: Operand, w: Operand, into_MK: Tensor | None = None) -> Tensor:
        dx_MK = self._scaled(dy, w, dy.dtype)
        if dx_MK is None:
            dx_MK = NATIVE.dx(self._values(dy), self._values(w)).to(dy.dtype)
        return dx_MK if into_MK is None else into_MK.copy_(dx_MK)

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        dw_NK = self._scaled(dy, x, dtype)
        return NATIVE.dw(self._values(dy), self._values(x), dtype) if dw_NK is None else dw_NK.to(dtype)

    def dw_into(self, main_grad_NK: Tensor, dy: Operand, x: Operand, holds_gradient: bool) -> None:
        dw_NK = self._scaled(dy, x, main_grad_NK.dtype)
        if dw_NK is None:
            NATIVE.dw_into(main_grad_NK, self._values(dy), self._values(x), holds_gradient)
        else:
            (main_grad_NK.add_ if holds_gradient else main_grad_NK.copy_)(dw_NK)

    def _watched(self, name: str, t: Tensor, operand: Operand) -> Operand:
        """Return an operand that was made of a tensor, after the hook has seen both."""
        if self._hook is not None:
            self._hook(name, t, operand)
        return operand

    def _scaled(self, a: Operand, b: Operand, dtype: torch.dtype, is_fast: bool = False) -> Tensor | None:
        """Return a b^T by the scaled kernel of the operands' device; None if it has none."""
        kernel = self.kernel_of(self.recipe_name, a.data.device, a.dtype)
        return scaled_product(kernel, a, b, dtype, is_fast) if kernel and fits(kernel, a, b) else None

    def _dtype(self, w_NK: Tensor) -> torch.dtype:
        """Return the dtype of the values of a parameter."""
        return w_NK.dtype if self._stored is None else self._stored[1]

    def _restored_w(self, w_NK: Tensor, scales: Tensor, at: Direction) -> Operand:
        """Return W that is stored in fp8 as it is multiplied for Y, or for dX."""
        operand = Operand(w_NK.detach(), scales, _form(self.recipe.w, self._dtype(w_NK), is_transposed=False))
        return operand if at is Direction.FORWARD else transposed(operand)

    def _values(self, operand: Operand) -> Operand:
        """Return the values of a quantized operand."""
        assert operand.form is not None, "the operand is quantized"
        values = dequantized(operand, restored_dtype(operand.dtype, self.recipe.has_powers))
        return Operand(values.T if operand.form.is_transposed else values)

    def _along_m(self, operand: Operand, t: Tensor | None, layout: Layout) -> Operand:
        """Return the transposed form of a quantized operand, made of the tensor before, or of its values if None."""
        form = operand.form
        assert form is not None and operand.scales is not None, "the operand is quantized"
        if self.recipe.x.is_square:
            return transposed(operand)
        fp8 = operand.data.dtype
        if t is None and self.fuses(operand.data):
            (turned,) = self._fused(
                operand.data, self.recipe.x, fp8, makes=(False, True), dtype=form.dtype, scales=operand.scales
            )
            return turned
        values = self._values(operand).data if t is None else t
        return self._quantized(values, self.recipe.x, fp8, layout, form.dtype, transposes=True)

    def fuses(self, t: Tensor) -> bool:
        """Return whether Triton's kernel quantizes a tensor: on GPUs, blocks that lie within shards."""
        is_dense = t.is_cuda and t.stride(1) == 1 and t.dtype != torch.float64
        return is_dense and self.recipe.block is not None and self.recipe.has_powers and has_triton()

    def _fused(
        self,
        t: Tensor,
        blocks: Blocks,
        fp8: torch.dtype,
        *,
        makes: tuple[bool, bool] = (True, True),
        dtype: torch.dtype | None = None,
        scales: Tensor | None = None,
    ) -> list[Operand]:
        """Return those forms of a tensor, straight and transposed, that `makes` says, by Triton's kernel in one pass.

        Args:
            dtype: that of its values, if it is not its own: it is fp8, with `scales`.
        """
        from megatron3d.linear.triton_fp8 import quantize

        made = quantize(t, fp8, LARGEST_EXPONENT[fp8], self.scale_dtype, blocks, makes=makes, scales=scales)
        forms = (_form(blocks, dtype or t.dtype, is_transposed=is_transposed) for is_transposed in (False, True))
        return [Operand(*data, form) for data, form in zip(made, forms, strict=True) if data]

    def _quantized(
        self,
        t: Tensor,
        blocks: Blocks,
        fp8: torch.dtype,
        layout: Layout,
        dtype: torch.dtype | None = None,
        *,
        transposes: bool = False,
    ) -> Operand:
        """Return a tensor as fp8, or its transpose; `layout`: the axes that split its dims, `dtype`: of its values."""
        if self.fuses(t):
            (operand,) = self._fused(t, blocks, fp8, makes=(not transposes, transposes), dtype=dtype)
            return operand
        own = blocks.transposed if transposes else blocks  # CPUs reduce a tensor faster than its transpose
        largest = largest_of_blocks(t, own)
        axes = reduced_axes(own, layout, self.comm.mesh)
        if axes:
            largest = self.comm.all_reduce(largest, axes, op="max").wait()
        data, inverse = quantized(t, own, fp8, self.recipe.has_powers, largest)
        scales = inverse.to(self.scale_dtype)
        form = _form(blocks, dtype or t.dtype, is_transposed=transposes)
        return Operand(*((data.T.contiguous(), scales.T.contiguous()) if transposes else (data, scales)), form)


def transposed(operand: Operand) -> Operand:
    """Return the second form of an operand whose blocks are as wide as high."""
    assert operand.form is not None and operand.scales is not None, "the operand is quantized"
    form = operand.form._replace(is_transposed=True)
    return Operand(operand.data.T.contiguous(), operand.scales.T.contiguous(), form)


def _form(blocks: Blocks, dtype: torch.dtype, *, is_transposed: bool) -> Form:
    return Form(blocks.rows, blocks.summed, dtype, is_transposed)
