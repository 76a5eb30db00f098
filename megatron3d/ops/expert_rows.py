"""Rows of tokens in the order of experts, and back: the part of a mixture of experts that every dispatcher shares.

    tokens [M, H] -> rows [M K, H] sorted by (expert, token, slot) -> experts -> the slots of each token, added in order

Forward and backward read rows by index and add them slot by slot, so that nothing is added with atomics.
Letters: M tokens, H hidden, K experts of a token, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron3d.ops.router import counts_of


class RowOrder:
    """Order of the rows of all tokens' slots by expert; slots of experts that other ranks hold have no row.

    Args:
        experts_MK: expert of each slot, counted from the first one of this rank; others have any index outside.
        num_experts: experts of this rank.
        num_balanced: rows of this rank where the load is balanced, which a dry run assumes.

    Attributes:
        counts: rows of each expert.
        order_R: place among the slots [M, K], flattened, of each row.
        row_MK: row of each slot; the number of rows for a slot without a row.
    """

    def __init__(self, experts_MK: Tensor, num_experts: int, num_balanced: int) -> None:
        is_mine = (experts_MK >= 0) & (experts_MK < num_experts)
        sorted_S, order_S = experts_MK.where(is_mine, num_experts).flatten().sort(stable=True)
        self.counts = on_host(counts_of(sorted_S, num_experts), num_balanced)
        self.num_rows = sum(self.counts)
        self.order_R = order_S[: self.num_rows]
        self.row_MK = inverse_of(order_S).clamp_(max=self.num_rows).view(experts_MK.shape)


def inverse_of(order_R: Tensor) -> Tensor:
    """Return the permutation that undoes another one."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def on_host(counts: Tensor, total: int) -> list[int]:
    """Return counts as Python's numbers, once the device has them; without values, as in a dry run, balanced ones.

    Args:
        total: sum of the balanced counts.
    """
    if isinstance(counts, FakeTensor):
        return [total // len(counts) + (place < total % len(counts)) for place in range(len(counts))]
    return [int(count) for count in counts.tolist()]


def _sum_of_slots(y_RH: Tensor, row_MK: Tensor, weights_MK: Tensor | None = None) -> Tensor:
    """Return [M, H]: each token's rows, weighted, added slot by slot in fp32 or wider."""
    wide = torch.promote_types(y_RH.dtype, torch.float32)
    padded_RH = torch.cat((y_RH, y_RH.new_zeros(1, y_RH.shape[1])))
    total_MH = y_RH.new_zeros((len(row_MK), y_RH.shape[1]), dtype=wide)
    for slot in range(row_MK.shape[1]):
        rows_MH = padded_RH.index_select(0, row_MK[:, slot])
        total_MH += rows_MH if weights_MK is None else rows_MH * weights_MK[:, slot : slot + 1]
    return total_MH.to(y_RH.dtype)


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, order_R: Tensor, row_MK: Tensor) -> Tensor:
        ctx.save_for_backward(row_MK)
        return x_MH.index_select(0, order_R // row_MK.shape[1])

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        (row_MK,) = ctx.saved_tensors
        return _sum_of_slots(dy_RH, row_MK), None, None


class _AddSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_MK: Tensor, order_R: Tensor, row_MK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RH, weights_MK, order_R)
        return _sum_of_slots(y_RH, row_MK, weights_MK)

    @staticmethod
    def backward(ctx: Any, dout_MH: Tensor) -> tuple[Tensor | None, ...]:
        y_RH, weights_MK, order_R = ctx.saved_tensors
        rows_RH = dout_MH.index_select(0, order_R // weights_MK.shape[1])
        of_rows_R = (rows_RH * y_RH).sum(-1, dtype=weights_MK.dtype)
        dweights = torch.zeros_like(weights_MK).flatten().scatter_(0, order_R, of_rows_R).view_as(weights_MK)
        dy_RH = rows_RH * weights_MK.flatten().index_select(0, order_R).unsqueeze(-1)
        return dy_RH.to(y_RH.dtype), dweights, None, None


def take_tokens(x_MH: Tensor, rows: RowOrder) -> Tensor:
    """Return the rows [R, H] of this rank's experts."""
    y_RH: Tensor = _TakeTokens.apply(x_MH, rows.order_R, rows.row_MK)
    return y_RH


def add_slots(y_RH: Tensor, rows: RowOrder, weights_MK: Tensor) -> Tensor:
    """Return [M, H]: the sum over each token's slots, in ascending order of experts, of weight times row."""
    out_MH: Tensor = _AddSlots.apply(y_RH, weights_MK, rows.order_R, rows.row_MK)
    return out_MH


def ranges(counts: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of these lengths."""
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
