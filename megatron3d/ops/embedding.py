"""Word embedding: the contracting matmul of one-hot tokens with the LM head's stored matrix, as a lookup.

Gradients of repeated tokens are summed in fp32 or wider.  Letters: M tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.collectives import Y_DIMS, gather, gather_dy, reduce
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, moves

W_DIMS = {"K": 0, "N": 1}


def embedding(tokens_M: Tensor, w_VH: Tensor, padded_vocab: int, plan: MatmulPlan, comm: Comm) -> Tensor:
    """Return rows of `w_VH` for int64 `tokens_M` (all tokens along `plan.m`), in the plan's Y layout."""
    if not (plan.m or plan.k or plan.n) and w_VH.dtype == _wide(w_VH.dtype):
        return F.embedding(tokens_M, w_VH)
    y_MH: Tensor = _Embedding.apply(tokens_M, w_VH, padded_vocab, plan, comm)
    return y_MH


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_M: Tensor, w_VH: Tensor, padded_vocab: int, plan: MatmulPlan, comm: Comm) -> Tensor:
        low, high = span(padded_vocab, plan.k, comm.mesh)
        absent = (tokens_M < low) | (tokens_M >= high)
        rows_M = (tokens_M - low).masked_fill_(absent, 0)
        ctx.plan, ctx.comm = plan, comm
        ctx.num_rows = high - low
        ctx.save_for_backward(rows_M, absent)
        whole_VH = gather(w_VH, plan.w, W_DIMS, comm).wait()
        y_MH = whole_VH[rows_M].masked_fill_(absent.unsqueeze(-1), 0)
        return reduce(y_MH, moves(plan.y), Y_DIMS, comm).wait()

    @staticmethod
    def backward(ctx: Any, dy_MH: Tensor) -> tuple[Tensor | None, ...]:
        rows_M, absent = ctx.saved_tensors
        dy = gather_dy(dy_MH, ctx.plan, ctx.comm).wait().masked_fill(absent.unsqueeze(-1), 0)
        dw = torch.zeros((ctx.num_rows, dy.shape[1]), dtype=_wide(dy.dtype), device=dy.device)
        dw = dw.index_add_(0, rows_M, dy.to(dw.dtype)).to(dy.dtype)
        return None, reduce(dw, moves(ctx.plan.w), W_DIMS, ctx.comm).wait(), None, None, None
