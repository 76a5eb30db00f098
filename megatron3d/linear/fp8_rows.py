"""GEMMs of experts with fp8 operands: each row of a token is quantized on its own.

Which rows an expert has on a rank depends on the layout, since data-parallel ranks may share experts; a row and an
expert's matrix do not.  So these are quantized, and no scale is that of several rows:

    Y  = X W^T    X in fp8, rows in the recipe's blocks along K; tensorwise: a scale per row
    dX = dY W     dY in fp8, likewise along N;  W of each expert in its blocks, tensorwise one scale per expert
    dW = dY^T X   in the network's dtype: dY as it is, and X restored from the rows of fp8 that forward has kept

Blocks of dW would run along rows.  X of fc1 is quantized where a token is at home, and sent to the ranks of its experts
as bytes: the data of a row, then its scales.  Letters: R rows, K input features, N output features; F of all experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron3d.linear.fp8 import Fp8Gemm, dequantized
from megatron3d.linear.fp8_plan import Blocks
from megatron3d.linear.gemm import NATIVE, Form, Kept, Operand
from megatron3d.linear.overlap_plan import Direction
from megatron3d.linear.scaled_mm import fits, scaled_product


class Fp8RowsGemm(Fp8Gemm):
    """GEMM of experts' rows with fp8 operands; `w` takes the matrix of one expert."""

    @property
    def row_blocks(self) -> Blocks:
        """Return the blocks of X and dY."""
        return Blocks(1, self.recipe.x.summed)

    def x(self, x_MK: Tensor, is_kept: bool = False) -> Operand:
        return self._watched("X", x_MK, self._quantized(x_MK, self.row_blocks, self.format, self.plan.x_layout))

    def show_experts(self, w_ENK: Tensor) -> None:
        if self._hook is not None and self._stored is None:
            for w_NK in w_ENK:
                self._hook("W", w_NK, self.w(w_NK))

    def w_of(self, w_ENK: Tensor, expert: int, at: Direction = Direction.FORWARD) -> Operand:
        if self._stored is None:
            return super().w_of(w_ENK, expert, at)
        return self._restored_w(w_ENK[expert], self._stored[0].chunk(len(w_ENK))[expert], at)

    def packed(self, x_MK: Tensor) -> Tensor:
        x = self.x(x_MK)
        assert x.scales is not None, "x is quantized"
        return torch.cat((x.data.view(torch.uint8), x.scales.view(torch.uint8)), dim=1)

    def unpacked(self, packed_MC: Tensor, x_MK: Tensor) -> Operand:
        num_features = x_MK.shape[1]
        data, scales = packed_MC[:, :num_features].contiguous(), packed_MC[:, num_features:].contiguous()
        form = Form(*self.row_blocks, x_MK.dtype)
        return Operand(data.view(self.format), scales.view(self.scale_dtype), form)

    def dy(self, dy_MN: Tensor) -> Operand:
        return Operand(dy_MN)

    def gathered(self, dy: Operand) -> tuple[Operand, Operand]:
        along_n = self._quantized(dy.data, self.row_blocks, self.dy_format, (self.plan.m, self.plan.n))
        return self._watched("dY", dy.data, along_n), dy

    def keep(self, x_MK: Tensor, x: Operand, w_NK: Tensor) -> Kept:
        return x.data, x.scales, w_NK

    def kept(self, saved: Kept) -> tuple[Operand, Tensor]:
        data_RK, scales, w_FK = saved
        assert data_RK is not None and w_FK is not None, "both are kept"
        return Operand(data_RK, scales, Form(*self.row_blocks, self._dtype(w_FK))), w_FK

    def dw(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return NATIVE.dw(dy, self._restored(x, dy), dtype)

    def dw_into(self, main_grad_NK: Tensor, dy: Operand, x: Operand, holds_gradient: bool) -> None:
        NATIVE.dw_into(main_grad_NK, dy, self._restored(x, dy), holds_gradient)

    def _watched(self, name: str, t: Tensor, operand: Operand) -> Operand:
        """Show no W of one expert: which of them have rows on a rank depends on the layout."""
        return operand if name == "W" else super()._watched(name, t, operand)

    def _scaled(self, a: Operand, b: Operand, dtype: torch.dtype, is_fast: bool = False) -> Tensor | None:
        """Return a b^T by the scaled kernel; that of rows takes the scale of a whole matrix as one for each row."""
        assert b.form is not None and b.scales is not None, "W is quantized"
        if b.form.rows is not None:
            return super()._scaled(a, b, dtype, is_fast)
        b = Operand(b.data, b.scales.repeat(len(b.data), 1), b.form._replace(rows=1))
        kernel = self.kernel_of("rowwise", a.data.device, a.dtype)
        return scaled_product(kernel, a, b, dtype, is_fast) if kernel and fits(kernel, a, b) else None

    def _restored(self, x: Operand, dy: Operand) -> Operand:
        return Operand(dequantized(x).to(dy.dtype))
