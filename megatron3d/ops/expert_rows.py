"""Rows of tokens in the order of experts, and back: the part of a mixture of experts that every dispatcher shares.

    tokens [M, H] -> rows [M K, H] sorted by (expert, token, slot) -> experts -> the slots of each token, added in order

Every reordering is a permutation whose backward is the inverse one, so that no gradient is added with atomics.
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
    """Order of the rows of all tokens' slots by expert.

    Attributes:
        order_R: place among the slots [M, K], flattened, of each row.
        inverse_R: row of each slot.
        counts_E: rows of each expert.
    """

    def __init__(self, experts_MK: Tensor, num_experts: int) -> None:
        flat = experts_MK.flatten()
        sorted_R, self.order_R = flat.sort(stable=True)
        self.inverse_R = inverse_of(self.order_R)
        self.counts_E = counts_of(sorted_R, num_experts)


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


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, order_R: Tensor, inverse_R: Tensor, num_slots: int) -> Tensor:
        ctx.num_slots = num_slots
        ctx.save_for_backward(inverse_R)
        return x_MH.index_select(0, order_R // num_slots)

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return dy_RH.index_select(0, inverse_R).unflatten(0, (-1, ctx.num_slots)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return dy_RH.index_select(0, inverse_R), None, None


def take_tokens(x_MH: Tensor, rows: RowOrder, num_slots: int) -> Tensor:
    """Return the rows [R, H] of all slots in the order of experts."""
    y_RH: Tensor = _TakeTokens.apply(x_MH, rows.order_R, rows.inverse_R, num_slots)
    return y_RH


def permute(x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return the rows `order_R` of x."""
    y_RH: Tensor = _Permute.apply(x_RH, order_R, inverse_R)
    return y_RH


def add_slots(y_RH: Tensor, rows: RowOrder, weights_MK: Tensor) -> Tensor:
    """Return [M, H]: the sum over each token's slots, in ascending order of experts, of weight times row."""
    y_MKH = permute(y_RH, rows.inverse_R, rows.order_R).unflatten(0, weights_MK.shape)
    out_MH: Tensor = (y_MKH * weights_MK.to(y_RH.dtype).unsqueeze(-1)).sum(1)
    return out_MH


def ranges(counts: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of these lengths."""
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
