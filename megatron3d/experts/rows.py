"""Rows of tokens in the order of experts, and back: the part of a mixture of experts that every dispatcher shares.

    tokens [M, H] -> rows [M K, H] sorted by (expert, token, slot) -> experts -> the slots of each token, added in order

Forward and backward read rows by index and add them slot by slot, so that nothing is added with atomics.
Letters: M tokens, H hidden, K experts of a token, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron3d.experts.router import counts_of


class RowOrder:
    """Order of the rows of all tokens' slots by expert; slots of experts that other ranks hold have no row.

    Args:
        experts_MK: expert of each slot, counted from the first one of this rank; others have any index outside.
        num_experts: experts of this rank.

    Attributes:
        num_slots: number of all slots.
        topk: slots of a token.
        counts_E: rows of each expert.
        order_S: place among the slots [M, K], flattened, of each row, then of the slots that have none.
    """

    def __init__(self, experts_MK: Tensor, num_experts: int) -> None:
        self.num_slots, self.topk = experts_MK.numel(), experts_MK.shape[1]
        is_mine = (experts_MK >= 0) & (experts_MK < num_experts)
        sorted_S, self.order_S = experts_MK.where(is_mine, num_experts).flatten().sort(stable=True)
        self.counts_E = counts_of(sorted_S, num_experts)

    @cached_property
    def row_MK(self) -> Tensor:
        """Place of each slot in the order."""
        return inverse_of(self.order_S).view(-1, self.topk)

    def first(self, num_rows: int) -> Tensor:
        """Return the places of the first rows, without the memory of the others."""
        return self.order_S if num_rows == self.num_slots else self.order_S[:num_rows].clone()


def inverse_of(order_R: Tensor) -> Tensor:
    """Return the permutation that undoes another one."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


class RowCounts:
    """Numbers of rows on the device, on their way to the host, which is delayed by nothing that is computed later.

    Attributes:
        numbers: the numbers, 1-D.
    """

    def __init__(self, numbers: Tensor, even: list[int]) -> None:
        """Start to copy; `even` are the numbers where tensors have no values, as in a dry run."""
        self.numbers, self._even = numbers, even
        self._host: Tensor | None = None
        if numbers.device.type != "cpu" and not isinstance(numbers, FakeTensor):
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.accelerator.current_stream(numbers.device).record_event()

    @cached_property
    def on_host(self) -> list[int]:
        """The numbers as Python's, once the device has them."""
        if isinstance(self.numbers, FakeTensor):
            return self._even
        if self._host is not None:
            self._copied.synchronize()
        return [int(number) for number in (self.numbers if self._host is None else self._host).tolist()]


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return dy_RH.index_select(0, inverse_R), None, None


def by_expert(counts_CE: Tensor, num_rows: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return what orders rows that came from C ranks, each one's sorted by expert, by (expert, rank), and the inverse.

    Args:
        counts_CE: rows of each expert from each rank.
        num_rows: their sum.
    """
    num_ranks, num_experts = counts_CE.shape
    if num_experts == 1:
        return lambda x_RH: x_RH, lambda x_RH: x_RH
    experts = torch.arange(num_experts, device=counts_CE.device).repeat(num_ranks)
    order_R = experts.repeat_interleave(counts_CE.flatten(), output_size=num_rows).argsort(stable=True)
    inverse_R = inverse_of(order_R)
    return (
        lambda x_RH: _Reorder.apply(x_RH, order_R, inverse_R),
        lambda x_RH: _Reorder.apply(x_RH, inverse_R, order_R),
    )


def _sum_of_slots(y_SH: Tensor, row_MK: Tensor, weights_MK: Tensor | None = None) -> Tensor:
    """Return [M, H]: each token's rows, weighted, added slot by slot in fp32 or wider; every slot has a row."""
    wide = torch.promote_types(y_SH.dtype, torch.float32)
    total_MH = y_SH.new_zeros((len(row_MK), y_SH.shape[1]), dtype=wide)
    for slot in range(row_MK.shape[1]):
        rows_MH = y_SH.index_select(0, row_MK[:, slot])
        if weights_MK is None:
            total_MH += rows_MH
        else:
            total_MH.addcmul_(rows_MH, weights_MK[:, slot : slot + 1])
    return total_MH.to(y_SH.dtype)


def _sum_by_expert(
    y_RH: Tensor, token_R: Tensor, counts: Sequence[int], num_tokens: int, weights_R: Tensor | None = None
) -> Tensor:
    """Return the same where few slots have a row, added expert by expert: of each a token has one row at most."""
    wide = torch.promote_types(y_RH.dtype, torch.float32)
    total_MH = y_RH.new_zeros((num_tokens, y_RH.shape[1]), dtype=wide)
    for part in ranges(counts):
        rows_RH = y_RH[part].to(wide) if weights_R is None else y_RH[part] * weights_R[part].unsqueeze(1)
        total_MH.index_add_(0, token_R[part], rows_RH)
    return total_MH.to(y_RH.dtype)


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, rows: RowOrder, num_rows: int, counts: Sequence[int]) -> Tensor:
        token_R = rows.order_S[:num_rows] // rows.topk
        ctx.num_tokens, ctx.counts = len(x_MH), None if num_rows == rows.num_slots else counts
        ctx.save_for_backward(rows.row_MK if ctx.counts is None else token_R)
        return x_MH.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        if ctx.counts is None:
            return _sum_of_slots(dy_RH, places), None, None, None
        return _sum_by_expert(dy_RH, places, ctx.counts, ctx.num_tokens), None, None, None


class _AddSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_MK: Tensor, rows: RowOrder, counts: Sequence[int]) -> Tensor:
        order_R = rows.first(len(y_RH))
        ctx.save_for_backward(y_RH, weights_MK, order_R)
        if len(y_RH) == rows.num_slots:
            return _sum_of_slots(y_RH, rows.row_MK, weights_MK)
        weights_R = weights_MK.flatten().index_select(0, order_R)
        return _sum_by_expert(y_RH, order_R // rows.topk, counts, len(weights_MK), weights_R)

    @staticmethod
    def backward(ctx: Any, dout_MH: Tensor) -> tuple[Tensor | None, ...]:
        y_RH, weights_MK, order_R = ctx.saved_tensors
        rows_RH = dout_MH.index_select(0, order_R // weights_MK.shape[1])
        of_rows_R = (rows_RH * y_RH).sum(-1, dtype=weights_MK.dtype)
        dweights = torch.zeros_like(weights_MK).flatten().scatter_(0, order_R, of_rows_R).view_as(weights_MK)
        rows_RH *= weights_MK.flatten().index_select(0, order_R).unsqueeze(-1)
        return rows_RH, dweights, None, None


def take_tokens(x_MH: Tensor, rows: RowOrder, num_rows: int, counts: Sequence[int] = ()) -> Tensor:
    """Return the first rows [R, H] in the order of experts.

    Args:
        counts: rows of each expert; only read where some slots have no row.
    """
    y_RH: Tensor = _TakeTokens.apply(x_MH, rows, num_rows, counts)
    return y_RH


def add_slots(y_RH: Tensor, rows: RowOrder, weights_MK: Tensor, counts: Sequence[int] = ()) -> Tensor:
    """Return [M, H]: the sum over each token's slots, in ascending order of experts, of weight times row.

    Args:
        counts: rows of each expert; only read where some slots have no row.
    """
    out_MH: Tensor = _AddSlots.apply(y_RH, weights_MK, rows, counts)
    return out_MH


def ranges(counts: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of these lengths."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
