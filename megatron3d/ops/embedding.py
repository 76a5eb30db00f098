"""Word embedding: the contracting matmul of one-hot tokens with the LM head's stored matrix, as a lookup.

Gradients of repeated tokens are summed in fp32 or wider; where no axis reduces them, in main_grad itself, without a
gradient of the table's size per microbatch.  Letters: M tokens, V vocabulary, H hidden, U distinct tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import Y_DIMS, gather, gather_dy, reduce
from megatron3d.linear.main_grad import MainGrad, MainGrads, add_gradient
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, moves

W_DIMS = {"K": 0, "N": 1}


def embedding(
    tokens_M: Tensor, w_VH: Tensor, padded_vocab: int, plan: MatmulPlan, comm: Comm, main_grads: MainGrads | None = None
) -> Tensor:
    """Return rows of `w_VH` for int64 `tokens_M` (all tokens along `plan.m`), in the plan's Y layout.

    If `main_grads` has a buffer for `w_VH`, backward adds the gradient to it, once for each use of the table: rows of
    tokens where no axis reduces the gradient, else a gradient of the table's shape.
    """
    buffer = None if main_grads is None else main_grads.buffer(w_VH)
    is_wide = w_VH.dtype == torch.promote_types(w_VH.dtype, torch.float32)
    if buffer is None and not (plan.m or plan.k or plan.n) and is_wide:
        return F.embedding(tokens_M, w_VH)
    y_MH: Tensor = _Embedding.apply(tokens_M, w_VH, padded_vocab, plan, comm, buffer)
    return y_MH


def _add_rows(buffer: MainGrad, rows_M: Tensor, dy_MH: Tensor) -> None:
    """Add the gradient of each token to its row of main_grad, in an order that does not change from run to run."""
    into_VH, holds_gradient = buffer.open()
    if not holds_gradient:
        into_VH.zero_()
    _add_sums(into_VH, rows_M, dy_MH.to(into_VH.dtype))
    buffer.close()


def _sums(dy_MH: Tensor, rows_M: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the gradients of each of the rows [rows, H].

    On GPUs this kernel of torch sorts the tokens and adds pieces of a frequent token's gradients in parallel, in a
    fixed order: `index_add_` uses atomics there, and `index_put_` adds all of one token one after another.
    """
    sums: Tensor = torch.ops.aten.embedding_dense_backward(dy_MH, rows_M, num_rows, -1, False)
    return sums


def _add_sums(into_VH: Tensor, rows_M: Tensor, dy_MH: Tensor) -> None:
    """Add the sum of each distinct row once, which rounds like adding a gradient of the table's size.

    Sums that no row needs are zero and are added to any rows, so that shapes do not depend on the values.  A row gets
    one sum that may not be zero, so that the order of additions changes nothing.
    """
    if not len(rows_M):
        return
    sorted_M, order_M = rows_M.sort(stable=True)
    is_new_M = sorted_M.diff(prepend=sorted_M[:1]) != 0
    place_M = is_new_M.cumsum(0)
    num_sums = min(len(rows_M), len(into_VH))
    row_U = torch.arange(num_sums, device=rows_M.device).scatter_(0, place_M, sorted_M)
    place_M = torch.empty_like(place_M).scatter_(0, order_M, place_M)
    into_VH.index_add_(0, row_U, _sums(dy_MH, place_M, num_sums))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_M: Tensor,
        w_VH: Tensor,
        padded_vocab: int,
        plan: MatmulPlan,
        comm: Comm,
        buffer: MainGrad | None,
    ) -> Tensor:
        low, high = span(padded_vocab, plan.k, comm.mesh)
        rows_M, absent_M1 = tokens_M, None
        if plan.k:
            absent_M = (tokens_M < low) | (tokens_M >= high)
            rows_M, absent_M1 = (tokens_M - low).masked_fill_(absent_M, 0), absent_M.unsqueeze(-1)
        ctx.plan, ctx.comm, ctx.buffer = plan, comm, buffer
        ctx.num_rows = high - low
        ctx.save_for_backward(rows_M, absent_M1)
        whole_VH = gather(w_VH, plan.w, W_DIMS, comm).wait()
        y_MH = F.embedding(rows_M, whole_VH)
        if absent_M1 is not None:
            y_MH.masked_fill_(absent_M1, 0)
        return reduce(y_MH, moves(plan.y), Y_DIMS, comm).wait()

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        rows_M, absent_M1 = ctx.saved_tensors
        dy = gather_dy(dy_MH, ctx.plan, ctx.comm).wait()
        if absent_M1 is not None:
            dy = dy.masked_fill(absent_M1, 0)
        unused = (None,) * 4
        if ctx.buffer is not None and not ctx.plan.w:
            _add_rows(ctx.buffer, rows_M, dy)
            return None, None, *unused
        dw = _sums(dy.to(torch.promote_types(dy.dtype, torch.float32)), rows_M, ctx.num_rows).to(dy.dtype)
        dw = reduce(dw, moves(ctx.plan.w), W_DIMS, ctx.comm).wait()
        if ctx.buffer is None:
            return None, dw, *unused
        add_gradient(ctx.buffer, dw)
        return None, None, *unused
