"""`main_grad`, the gradient buffer of a parameter in fp32 or wider, and the routes by which gradients reach it.

    backward of layer i     dgrad GEMM | wgrad GEMM | dgrad GEMM of layer i-1 | ...
    reduction of dW_i                               | in flight               | added to main_grad

Overlapping the reduction with the backward of the preceding layers is ORS of Singh et al. 2024 (arXiv:2305.13525,
section 5); deferring the whole wgrad to fill pipeline bubbles is from Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.collectives import W_DIMS, reduce
from megatron3d.linear.gemm import NATIVE, Gemm, Operand
from megatron3d.parallel.matmul_plan import MatmulPlan, moves


class MainGrad(Protocol):
    """Buffer that sums one parameter's gradients over the microbatches of a step."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which axes reduce partial gradients: that of the buffer, unless another was chosen."""
        ...

    def open(self) -> tuple[Tensor, bool]:
        """Return the buffer, and whether it already holds gradients of this step; else it is to be overwritten."""
        ...

    def close(self) -> None:
        """Count one gradient as completely added."""
        ...


class MainGrads:
    """Registry of main_grad buffers by parameter, and the seven routes by which a gradient reaches one.

        norms, biases                autograd's backward ───── post-accumulate hook ──── collect ────┐
        embedding, dW is not reduced rows dY of each token, summed by token ──────────── buffer ─────┤
        embedding, dW reduced        rows dY in a dW of the table's shape, reduced ───── add ────────┤
        linear, dW is not reduced    GEMM dY^T X with beta=1 ─────────────────────────── accumulate ─┤
        experts, dW is not reduced   a GEMM per expert with beta=1 ──────────────── accumulate_rows ─┤
        linear, dW reduced or late   GEMM dY^T X ──── reduction in flight, WgradQueue ── add ────────┼── main_grad
        LM head                      GEMMs per chunk of the fused loss ──── WgradSum ─── finish ─────┘

    Accumulating GEMMs sum bf16 operands in fp32 without rounding dW to bf16 first, and need no memory for dW.
    The gradient of a parameter without a buffer goes to its `grad`, as in plain PyTorch.
    """

    def __init__(self) -> None:
        # By identity: a tensor's own hash is a Python function, which takes as long as the rest of a lookup.
        self._buffers: dict[int, MainGrad] = {}
        self._params: list[Tensor] = []  # alive, so that no other tensor takes an identity

    def register(self, param: Tensor, buffer: MainGrad) -> None:
        """Sum all gradients of a parameter in `buffer`, those that autograd computes included."""
        self._buffers[id(param)] = buffer
        self._params.append(param)
        param.register_post_accumulate_grad_hook(partial(_collect, buffer))

    def buffer(self, param: Tensor) -> MainGrad | None:
        """Return the buffer of a parameter, None where it has none."""
        return self._buffers.get(id(param))

    def reduce_dtype(self, param: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which axes reduce dW, whose operands have `dtype`: that of main_grad where there is one.

        Rounding each rank's term to bf16 first, which can be chosen, loses some of what main_grad's fp32 is for.
        """
        buffer = self.buffer(param)
        return dtype if buffer is None else torch.promote_types(dtype, buffer.reduce_dtype)

    def accumulate(self, param: Tensor, gemm: Gemm, dy: Operand, x: Operand) -> bool:
        """Add dW = dY^T X to the buffer in the GEMM itself; if there is no buffer, do nothing and return False."""
        buffer = self.buffer(param)
        if buffer is None:
            return False
        into, holds_gradient = buffer.open()
        gemm.dw_into(into, dy, x, holds_gradient)
        buffer.close()
        return True

    def accumulate_rows(
        self, param: Tensor, gemm: Gemm, operands: Iterable[tuple[Operand, Operand]], num_parts: int
    ) -> bool:
        """Add dY^T X of each pair of operands to an equal part of the buffer's rows, in order; like `accumulate`.

        A pair without rows, that of an expert that no token chose, adds nothing.
        """
        buffer = self.buffer(param)
        if buffer is None:
            return False
        into, holds_gradient = buffer.open()
        for rows, (dy, x) in zip(into.chunk(num_parts), operands, strict=True):
            if len(dy.data):
                gemm.dw_into(rows, dy, x, holds_gradient)
            elif not holds_gradient:
                rows.zero_()
        buffer.close()
        return True

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Add a gradient of the shape of `param` that was not computed by autograd."""
        buffer = self.buffer(param)
        if buffer is None:
            param.grad = grad if param.grad is None else param.grad + grad
        else:
            add_gradient(buffer, grad)


def _collect(buffer: MainGrad, param: Tensor) -> None:
    """Move a gradient from autograd to the buffer; autograd calls this hook as well where it computed none."""
    if param.grad is not None:
        grad, param.grad = param.grad, None
        add_gradient(buffer, grad)


def add_gradient(buffer: MainGrad, grad: Tensor) -> None:
    """Add one gradient of the parameter's shape to its buffer."""
    into, holds_gradient = buffer.open()
    (into.add_ if holds_gradient else into.copy_)(grad)
    buffer.close()


class WgradSum:
    """dW as a sum of several GEMMs: in main_grad if no axis reduces dW, else in a separate fp32 buffer.

    Used by the chunks of the fused loss.
    """

    def __init__(self, param: Tensor, plan: MatmulPlan, comm: Comm, main_grads: MainGrads, gemm: Gemm = NATIVE) -> None:
        self._plan, self._comm, self._gemm = plan, comm, gemm
        self._buffer = None if plan.w else main_grads.buffer(param)
        self._reduce_dtype = partial(main_grads.reduce_dtype, param)
        self._sum: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, dy: Operand, x: Operand) -> None:
        """Add the term dY^T X [N, K] to dW."""
        if self._sum is not None:
            self._sum = self._sum.to(torch.promote_types(self._sum.dtype, torch.float32))
            self._gemm.dw_into(self._sum, dy, x, holds_gradient=True)
        elif self._buffer is None:
            self._dtype = self._reduce_dtype(dy.data.dtype)
            self._sum = self._gemm.dw(dy, x, self._dtype)
        else:
            self._sum, holds_gradient = self._buffer.open()
            self._gemm.dw_into(self._sum, dy, x, holds_gradient)

    def finish(self) -> Pending | None:
        """Start to reduce dW; return None where the GEMMs have accumulated it in main_grad."""
        if self._buffer is not None:
            self._buffer.close()
            return None
        assert self._sum is not None, "no product was added"
        total, self._sum = self._sum.to(self._dtype), None
        return reduce(total, moves(self._plan.w), W_DIMS, self._comm)


class WgradQueue:
    """Weight gradients on their way to main_grad.

    Args:
        main_grads: buffers that the gradients are added to.
        overlaps_reduction: keep the reduction of one dW in flight until the next one starts, or until `flush`.
    """

    def __init__(self, main_grads: MainGrads, overlaps_reduction: bool = False) -> None:
        self._main_grads, self._overlaps = main_grads, overlaps_reduction
        self._deferred: list[Callable[[], None]] | None = None
        self._in_flight: tuple[Tensor, Pending] | None = None

    @contextlib.contextmanager
    def defer(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the wgrads of the backward in the body; call them later in order, and `flush` after the last."""
        deferred: list[Callable[[], None]] = []
        self._deferred = deferred
        yield deferred
        self._deferred = None

    @property
    def is_deferring(self) -> bool:
        """Return whether the body of `defer` is running."""
        return self._deferred is not None

    def submit(self, w: Tensor, compute: Callable[[], Pending | None]) -> Pending | None:
        """Compute the gradient of `w` now, or later where wgrads are deferred.

        Args:
            compute: multiplies and starts the reduction; returns None where the GEMM accumulated in main_grad.

        Returns:
            dW for autograd; None where the queue, or `compute`, adds it to main_grad.
        """
        if self._deferred is not None:
            self._deferred.append(partial(self._compute, w, compute))
        elif self._overlaps:
            self._compute(w, compute)
        else:
            return compute()
        return None

    def _compute(self, w: Tensor, compute: Callable[[], Pending | None]) -> None:
        reduction = compute()
        self.flush()
        self._in_flight = None if reduction is None else (w, reduction)
        if not self._overlaps:
            self.flush()

    def flush(self) -> None:
        """Wait for the reduction in flight and add it to main_grad; to be called at the end of each backward."""
        if self._in_flight is not None:
            (w, reduction), self._in_flight = self._in_flight, None
            self._main_grads.add(w, reduction.wait())
