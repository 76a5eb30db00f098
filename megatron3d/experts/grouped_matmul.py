"""Grouped GEMM: consecutive rows times the weight of their expert, with weight gradients accumulated in main_grad.

    Y[rows of e, N] = X[rows of e, K] W_e^T + b_e    dX of e = dY of e W_e          dW_e = dY of e ^T X of e

Rows of X and dY are operands of a `Gemm` as a whole, W of each expert on its own.  The loop over experts is the
reference; on GPUs one kernel, `F.grouped_mm`, multiplies all experts of a bf16 tensor.
Weight gradients are a GEMM per expert everywhere, since that kernel would round them to bf16 before main_grad.
Letters: R rows of all experts, K input features, N output features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron3d.comm.interface import Pending, completed
from megatron3d.experts.rows import Groups, Rows, ranges
from megatron3d.linear.gemm import NATIVE, Gemm, Operand, is_compiled_by_shape
from megatron3d.linear.main_grad import MainGrads, WgradQueue
from megatron3d.linear.overlap_plan import Direction

# The kernel reads rows of whole 16 bytes.
_ALIGNMENT = 8
_FEWEST_PADDED = 16


def has_grouped_kernel(x_RK: Tensor, w_ENK: Tensor) -> bool:
    """Return whether one kernel multiplies all experts."""
    is_aligned = all(size % _ALIGNMENT == 0 for size in w_ENK.shape[1:])
    if not (x_RK.is_cuda and x_RK.dtype == torch.bfloat16 and is_aligned and hasattr(F, "grouped_mm")):
        return False
    return torch.cuda.get_device_capability(x_RK.device) >= (9, 0)


def grouped_gemm_name(x_RK: Tensor, w_ENK: Tensor, gemm: Gemm = NATIVE) -> str:
    """Return in words how the rows of experts are multiplied, for the report of a run's start."""
    if gemm is NATIVE and has_grouped_kernel(x_RK, w_ENK):
        return "one kernel for all experts of a rank, weight gradients expert by expert"
    needs = f"bf16, sizes in multiples of {_ALIGNMENT}, no other GEMM recipe, and a GPU of compute capability 9.0"
    return f"a loop over experts (the grouped kernel needs {needs})"


def grouped_product(x: Operand, w_ENK: Tensor, rows: Groups, gemm: Gemm = NATIVE) -> Tensor:
    """Return Y [R, N]: the first expert's rows times W_0^T, the next one's times W_1^T, and so on."""
    y_RN = _by_one_kernel(x.data, w_ENK.transpose(1, 2), rows, gemm)
    if y_RN is not None:
        return y_RN
    y_RN = x.data.new_empty((len(x.data), w_ENK.shape[1]), dtype=x.dtype)
    return _one_by_one(y_RN, x, rows, lambda x, expert, into: gemm.y(x, gemm.w_of(w_ENK, expert), into_MN=into))


def grouped_input_grad(dy: Operand, w_ENK: Tensor, rows: Groups, gemm: Gemm = NATIVE) -> Tensor:
    """Return dX [R, K]: the first expert's rows times W_0, the next one's times W_1, and so on."""
    dx_RK = _by_one_kernel(dy.data, w_ENK, rows, gemm)
    if dx_RK is not None:
        return dx_RK
    dx_RK = dy.data.new_empty((len(dy.data), w_ENK.shape[2]), dtype=dy.dtype)
    w_of = partial(gemm.w_of, w_ENK, at=Direction.BACKWARD)
    return _one_by_one(dx_RK, dy, rows, lambda dy, expert, into: gemm.dx(dy, w_of(expert), into_MK=into))


def _one_by_one(
    out: Tensor, x: Operand, rows: Groups, multiply: Callable[[Operand, int, Tensor | None], Tensor]
) -> Tensor:
    """Return `out` with the product of each expert's rows and its weight."""
    shaped = padded if is_compiled_by_shape(x.data) else lambda part: part
    for expert, (part, of_expert) in enumerate(zip(ranges(rows.counts), parts(x, rows.counts), strict=True)):
        count = part.stop - part.start
        if count:
            operand = shaped(of_expert)
            if len(operand.data) == count:
                multiply(operand, expert, out[part])
            else:
                out[part] = multiply(operand, expert, None)[:count]
    return out


def parts(rows: Operand, counts: Sequence[int]) -> list[Operand]:
    """Return consecutive rows of an operand whose scales are those of one row each."""
    scales = [None] * len(counts) if rows.scales is None else rows.scales.split(list(counts))
    return [Operand(*each, rows.form) for each in zip(rows.data.split(list(counts)), scales, strict=True)]


def padded(rows: Operand) -> Operand:
    """Return rows followed by zeros, up to a sixteenth more, for a kernel that is compiled for each shape.

    oneDNN keeps a thousand such kernels; padded rows have sixteen shapes for each power of two.  Fake tensors are not
    multiplied, and keep the FLOPs of the model.
    """
    count = len(rows.data)
    extra = -count % max(_FEWEST_PADDED, 1 << max(count.bit_length() - 5, 0))
    if not extra or isinstance(rows.data, FakeTensor):
        return rows
    scales = None if rows.scales is None else _with_zeros(rows.scales, extra)
    return Operand(_with_zeros(rows.data, extra), scales, rows.form)


def _with_zeros(t: Tensor, extra: int) -> Tensor:
    zeros = torch.zeros((extra, *t.shape[1:]), dtype=t.dtype, device=t.device)
    return torch.cat((t, zeros))


def _by_one_kernel(a_RK: Tensor, b_EKN: Tensor, rows: Groups, gemm: Gemm) -> Tensor | None:
    """Return the rows times the matrices of their experts by one kernel, where there is one."""
    if gemm is not NATIVE or not len(a_RK) or not has_grouped_kernel(a_RK, b_EKN):
        return None
    return F.grouped_mm(a_RK, b_EKN, offs=rows.ends_E)


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RN: Tensor, b_EN: Tensor, weights_R: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        ctx.mark_dirty(y_RN)
        ctx.save_for_backward(*(() if weights_R is None else (b_EN, weights_R)))
        for rows, b_N in zip(ranges(counts), b_EN, strict=True):
            y_RN[rows] += b_N if weights_R is None else weights_R[rows].unsqueeze(1) * b_N
        return y_RN

    @staticmethod
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        parts = ranges(ctx.counts)
        saved = ctx.saved_tensors  # once: recomputation gives them away
        if not saved:
            return dy_RN, torch.stack([dy_RN[rows].sum(0) for rows in parts]), None, None
        b_EN, weights_R = saved
        db_EN, dweights_R = torch.empty_like(b_EN), torch.empty_like(weights_R)
        for rows, b_N, db_N in zip(parts, b_EN, db_EN, strict=True):
            db_N.copy_((dy_RN[rows] * weights_R[rows].unsqueeze(1)).sum(0))
            dweights_R[rows] = (dy_RN[rows] * b_N).sum(1, dtype=weights_R.dtype)
        return dy_RN, db_EN, dweights_R, None


def add_biases(y_RN: Tensor, b_F: Tensor, counts: Sequence[int], weights_R: Tensor | None = None) -> Tensor:
    """Add to the rows of each expert, in place, its part of the biases [E N] times each row's weight; return the rows.

    Args:
        weights_R: weights of the rows; None: 1.
    """
    added_RN: Tensor = _AddBiases.apply(y_RN, b_F.unflatten(0, (len(counts), -1)), weights_R, tuple(counts))
    return added_RN


class GroupedMatmul:
    """Matmul of rows with the weights of `num_experts` experts, stored one below the other.

    Args:
        main_grads: buffers that weight gradients are accumulated in.
        wgrads: queue that defers weight gradients; None: they are computed in backward.
        gemm: recipe that multiplies.
    """

    def __init__(
        self, num_experts: int, main_grads: MainGrads, wgrads: WgradQueue | None = None, gemm: Gemm = NATIVE
    ) -> None:
        self.num_experts, self.main_grads, self.gemm = num_experts, main_grads, gemm
        self.wgrads = wgrads or WgradQueue(main_grads)

    def multiply_by(self, gemm: Gemm) -> None:
        """Multiply by a recipe from now on."""
        self.gemm = gemm

    def __call__(self, x: Rows, w_FK: Tensor, rows: Groups) -> Tensor:
        """Return Y [R, N] for rows X [R, K], weights [E N, K] and the rows of each expert."""
        assert len(rows.counts) == self.num_experts, f"{len(rows.counts)} counts for {self.num_experts} experts"
        y_RN: Tensor = _Grouped.apply(*x, w_FK, self, rows)
        return y_RN

    def by_expert(self, w_FK: Tensor) -> Tensor:
        """Return the weights as [E, N, K]."""
        w_ENK: Tensor = w_FK.unflatten(0, (self.num_experts, -1))
        return w_ENK

    def wgrad(self, param: Tensor, dy: Operand, x: Operand, counts: Sequence[int]) -> Pending | None:
        """Accumulate the weight gradients in main_grad; return them where there is no buffer."""
        gemm, shaped = self.gemm, padded if is_compiled_by_shape(dy.data.T) else lambda rows: rows
        operands = (
            (shaped(one), shaped(other)) for one, other in zip(parts(dy, counts), parts(x, counts), strict=True)
        )
        if self.main_grads.accumulate_rows(param, gemm, operands, self.num_experts):
            return None
        return completed(torch.cat([gemm.dw(dy, x, param.dtype) for dy, x in operands]))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RK: Tensor, packed_RC: Tensor | None, w_FK: Tensor, matmul: GroupedMatmul, rows: Groups
    ) -> Tensor:
        # The parameter itself names its main_grad; what is saved comes back as another tensor after recomputation.
        ctx.matmul, ctx.rows, ctx.param = matmul, rows, w_FK
        x = matmul.gemm.x(x_RK) if packed_RC is None else matmul.gemm.unpacked(packed_RC, x_RK)
        ctx.save_for_backward(*matmul.gemm.keep(x_RK, x, w_FK))
        w_ENK = matmul.by_expert(w_FK)
        matmul.gemm.show_experts(w_ENK)
        return grouped_product(x, w_ENK, rows, matmul.gemm)

    @staticmethod
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        matmul, rows = ctx.matmul, ctx.rows
        x, w_FK = matmul.gemm.kept(ctx.saved_tensors)
        dy, dy_of_dw = matmul.gemm.gathered(matmul.gemm.dy(dy_RN.contiguous()))
        needs_dx, w_ENK = ctx.needs_input_grad[0], matmul.by_expert(w_FK)
        dx = grouped_input_grad(dy, w_ENK, rows, matmul.gemm) if needs_dx else None
        dw = matmul.wgrads.submit(ctx.param, partial(matmul.wgrad, ctx.param, dy_of_dw, x, rows.counts))
        return dx, None, None if dw is None else dw.wait(), None, None
