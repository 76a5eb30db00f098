"""Rows of tokens in the order of experts, and back: the part of a mixture of experts that every dispatcher shares.

    tokens [M, H] -> rows [M K, H] sorted by (expert, token, slot) -> experts -> the rows of each token, added in order

The experts weight their own outputs, so that the sum keeps no rows for backward.  Forward and backward read rows by
index and add those of a token one after another, so that nothing is added with atomics.
Letters: M tokens, H hidden, K experts of a token, R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
        self._first: Tensor | None = None

    def first(self, num_rows: int) -> Tensor:
        """Return the places of the first rows, without the memory of the others."""
        if num_rows == self.num_slots:
            return self.order_S
        if self._first is None or len(self._first) != num_rows:
            self._first = self.order_S[:num_rows].clone()
        return self._first


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


class Rows(NamedTuple):
    """Rows [R, H] of tokens on their way to experts.

    Attributes:
        values: the rows; where `packed` stands for them, what autograd takes for them, without memory.
        packed: bytes [R, C] that are sent in their place (`Gemm.packed`); None: there are none.
    """

    values: Tensor
    packed: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Rows:
        """Return the rows after a move that is the same for rows of any kind."""
        if self.packed is None:
            return Rows(move(self.values))
        return Rows.of_packed(move(self.packed), self.values)

    def first(self, count: int) -> Rows:
        """Return the first rows."""
        return Rows(self.values[:count], None if self.packed is None else self.packed[:count])

    @staticmethod
    def of_packed(packed_RC: Tensor, like: Tensor) -> Rows:
        """Return packed rows of the width and dtype of others."""
        return Rows(like.new_empty((1, 1)).expand(len(packed_RC), like.shape[1]), packed_RC)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, packed_RC: Tensor | None, order_R: Tensor, inverse_R: Tensor) -> Rows:
        ctx.set_materialize_grads(packed_RC is None)  # bytes have no gradient, and need no zeros for it
        ctx.save_for_backward(inverse_R)
        return Rows(x_RH, packed_RC).moved(lambda rows: rows.index_select(0, order_R))

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor, _: None) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return dy_RH.index_select(0, inverse_R), None, None, None


def by_expert(counts_CE: Tensor, num_rows: int) -> tuple[Callable[[Rows], Rows], Callable[[Rows], Rows]]:
    """Return what orders rows that came from C ranks, each one's sorted by expert, by (expert, rank), and the inverse.

    Args:
        counts_CE: rows of each expert from each rank.
        num_rows: their sum.
    """
    num_ranks, num_experts = counts_CE.shape
    if num_experts == 1:
        return lambda rows: rows, lambda rows: rows
    experts = torch.arange(num_experts, device=counts_CE.device).repeat(num_ranks)
    order_R = experts.repeat_interleave(counts_CE.flatten(), output_size=num_rows).argsort(stable=True)
    inverse_R = inverse_of(order_R)
    return (
        lambda rows: Rows(*_Reorder.apply(*rows, order_R, inverse_R)),
        lambda rows: Rows(*_Reorder.apply(*rows, inverse_R, order_R)),
    )


def _add_rows(y_RH: Tensor, order_R: Tensor, num_tokens: int, topk: int) -> Tensor:
    """Return [M, H]: each token's rows, added in ascending order of experts, in fp32 or wider, by one kernel."""
    if not len(order_R):
        return y_RH.new_zeros((num_tokens, y_RH.shape[1]))
    if len(order_R) == num_tokens * topk:
        by_token_R = inverse_of(order_R)
        starts_M = torch.arange(0, len(order_R), topk, device=order_R.device)
    else:
        token_R, by_token_R = (order_R // topk).sort(stable=True)
        starts_M = torch.searchsorted(token_R, torch.arange(num_tokens, device=order_R.device))
    return F.embedding_bag(by_token_R, y_RH, starts_M, mode="sum")


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, packed_MC: Tensor | None, order_R: Tensor, topk: int) -> Rows:
        ctx.num_tokens, ctx.topk = len(x_MH), topk
        ctx.set_materialize_grads(packed_MC is None)
        ctx.save_for_backward(order_R)
        return Rows(x_MH, packed_MC).moved(lambda rows: rows.index_select(0, order_R // topk))

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor, _: None) -> tuple[Tensor | None, ...]:
        (order_R,) = ctx.saved_tensors
        return _add_rows(dy_RH.contiguous(), order_R, ctx.num_tokens, ctx.topk), None, None, None


class _TakeWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_MK: Tensor, order_R: Tensor) -> Tensor:
        ctx.shape = weights_MK.shape
        ctx.save_for_backward(order_R)
        return weights_MK.flatten().index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, dweights_R: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return dweights_R.new_zeros(ctx.shape.numel()).scatter_(0, order_R, dweights_R).view(ctx.shape), None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, order_R: Tensor, num_tokens: int, topk: int) -> Tensor:
        ctx.topk = topk
        ctx.save_for_backward(order_R)
        return _add_rows(y_RH, order_R, num_tokens, topk)

    @staticmethod
    def backward(ctx: Any, dout_MH: Tensor) -> tuple[Tensor, None, None, None]:
        (order_R,) = ctx.saved_tensors
        return dout_MH.index_select(0, order_R // ctx.topk), None, None, None


def take_tokens(tokens: Rows, rows: RowOrder, num_rows: int) -> Rows:
    """Return the first rows [R, H] in the order of experts."""
    return Rows(*_TakeTokens.apply(*tokens, rows.first(num_rows), rows.topk))


def take_weights(weights_MK: Tensor, rows: RowOrder, num_rows: int) -> Tensor:
    """Return the weights [R] of the first rows."""
    weights_R: Tensor = _TakeWeights.apply(weights_MK, rows.first(num_rows))
    return weights_R


def add_rows(y_RH: Tensor, rows: RowOrder) -> Tensor:
    """Return [M, H]: the sum of each token's rows in ascending order of experts; nothing is kept but their order."""
    out_MH: Tensor = _AddRows.apply(y_RH, rows.first(len(y_RH)), rows.num_slots // rows.topk, rows.topk)
    return out_MH


class Groups(NamedTuple):
    """Consecutive rows of experts.

    Attributes:
        counts: rows of each expert.
        ends_E: end of each expert's rows, on the device, as int32.
    """

    counts: Sequence[int]
    ends_E: Tensor


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_RC: Tensor | None, place_R: Tensor, num_rows: int) -> Rows:
        ctx.set_materialize_grads(packed_RC is None)
        ctx.save_for_backward(place_R)
        return Rows(x, packed_RC).moved(lambda t: t.new_zeros((num_rows, *t.shape[1:])).index_copy_(0, place_R, t))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        (place_R,) = ctx.saved_tensors
        return dy.index_select(0, place_R), None, None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, place_R: Tensor) -> Tensor:
        ctx.num_rows = len(y)
        ctx.save_for_backward(place_R)
        return y.index_select(0, place_R)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        (place_R,) = ctx.saved_tensors
        return dx.new_zeros((ctx.num_rows, *dx.shape[1:])).index_copy_(0, place_R, dx), None


# Rows, their weights, and how many each expert has.
Weighted = tuple[Rows, Tensor, Groups]


def padded_to(
    capacity: int | None, rows: Rows, weights_R: Tensor, groups: Groups
) -> tuple[Weighted, Callable[[Tensor], Tensor]]:
    """Return the rows, with zeros of weight 0 after those of each expert up to `capacity`, and what leaves them out.

    Args:
        capacity: None: there are no such rows.
    """
    if capacity is None:
        return (rows, weights_R, groups), lambda y: y
    ends_E = groups.ends_E.to(torch.int64)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    first_E = torch.arange(len(groups.counts), device=ends_E.device) * capacity
    shift_R = (first_E + counts_E - ends_E).repeat_interleave(counts_E, output_size=len(weights_R))
    place_R = torch.arange(len(weights_R), device=ends_E.device) + shift_R
    full = groups_of([capacity] * len(groups.counts), torch.full_like(ends_E, capacity))
    num_rows = sum(full.counts)
    of_rows, of_weights = (Rows(*_Pad.apply(*each, place_R, num_rows)) for each in (rows, Rows(weights_R)))
    return (of_rows, of_weights.values, full), lambda y: _Unpad.apply(y, place_R)


def groups_of(counts: Sequence[int], counts_E: Tensor) -> Groups:
    """Return the groups of these numbers of rows, on the host and on the device."""
    return Groups(counts, counts_E.cumsum(0, dtype=torch.int32))


def ranges(counts: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of these lengths."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
