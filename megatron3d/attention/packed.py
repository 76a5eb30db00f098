"""Attention within documents and sliding windows, by pairs of query and key rows: no [S, S] tensor, memory linear in S.

The kernel is the first entry of `KERNELS` that supports the device and dtype: torch's fused attention on CPUs,
variable-length flash attention on GPUs (Dao 2023, arXiv:2307.08691), else plain matmuls for a piece of the queries.
Letters: B sequences, S positions, N query heads, G key/value heads, D features of a head, L query rows, T key rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron3d.attention.pairs import (
    CPU,
    PLAIN,
    PLAIN_SOFTMAX,
    PairInputs,
    PairKernel,
    PlainKernel,
    Softmax,
    add_sink,
    sink_grad,
)
from megatron3d.attention.plan import LONGEST, Kind, Pair, Starts, sequence_pairs

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Visible:
    """What a query sees besides the causal order.

    Attributes:
        starts: first positions of the documents of each sequence after its first one; None: one document.
        window: number of keys that a query sees, itself included; None: all before it.
    """

    starts: tuple[Starts, ...] | None = None
    window: int | None = None

    def within(self, seq_length: int) -> Visible | None:
        """Return what restricts sequences of this length, None where the causal order alone does."""
        window = None if self.window is None or self.window >= seq_length else self.window
        return Visible(self.starts, window) if window is not None or any(self.starts or ()) else None

    def mask(self, row: int, queries: Sequence[int], keys: range, device: torch.device) -> Tensor:
        """Return bool [queries, keys] of one sequence: True where a query sees a key."""
        q, k = (positions_of(at, device) for at in (queries, keys))
        distance = q.unsqueeze(1) - k
        see = distance >= 0
        if self.window is not None:
            see &= distance < self.window
        starts = [start for start in self.starts[row] if keys.start < start < keys.stop] if self.starts else []
        if starts:
            bounds = positions_of(starts, device)
            document = [torch.bucketize(at, bounds, right=True) for at in (q, k)]
            see &= document[0].unsqueeze(1) == document[1]
        return see


def positions_of(places: Sequence[int], device: torch.device) -> Tensor:
    """Return ascending positions as int64, made on the device: it would wait for a copy of the host's."""
    runs, first = list[Tensor](), 0
    while first < len(places):
        start = places[first]
        last = bisect_right(range(len(places)), start - first, lo=first, key=lambda index: places[index] - index)
        runs.append(torch.arange(start, start + last - first, device=device))
        first = last
    return torch.cat(runs) if len(runs) > 1 else runs[0]


class Kernel(Protocol):
    """Attention of a rank's sequences and its gradients; all tensors are [B, heads, S, D], the lse [B, N, S]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        ...

    def backward(self, dy: Tensor, saved: Saved, visible: Visible) -> Grads:
        """Return the gradients of q, k and v, given these with the output and the log-sum-exp."""
        ...


def packed_attention(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible: Visible, softmax: Softmax = PLAIN_SOFTMAX
) -> Tensor:
    """Return attention [B, N, S, D] of queries to what they see; only q, k, v, the result and its lse are kept."""
    y: Tensor = _PackedAttention.apply(q_BNSD, k_BGSD, v_BGSD, softmax.sink_N, softmax.softcap, visible)
    return y


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_N: Tensor | None, softcap: float | None, visible: Visible
    ) -> Tensor:
        ctx.visible, ctx.kernel = visible, choose(q, k, softcap).kernel
        out, lse = ctx.kernel.forward(q, k, v, visible)
        out, lse = add_sink(out, lse, sink_N)
        ctx.save_for_backward(q, k, v, out, lse, sink_N)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink_N = ctx.saved_tensors
        dsink_N = sink_grad(dy, saved[3], saved[4], sink_N)
        return *ctx.kernel.backward(dy, tuple(saved), ctx.visible), dsink_N, None, None


class ByPairs:
    """One kernel call for each pair of rows.

    Args:
        longest: most queries of a pair.
    """

    def __init__(self, kernel: PairKernel, longest: int | None = None) -> None:
        self._kernel, self._longest = kernel, longest

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        out = _by_position(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, pair, mask in self._pairs(q, visible):
            queries, keys = slice(*pair.queries), slice(*pair.keys)
            operands = q[rows, :, queries], k[rows, :, keys], v[rows, :, keys]
            seen = PairInputs(*operands, pair.kind is Kind.CAUSAL, mask)
            out[rows, :, queries], lse[rows, :, queries] = self._kernel.forward(seen)
        return out, lse

    def backward(self, dy: Tensor, saved: Saved, visible: Visible) -> Grads:
        q, k, v, out, lse = saved
        overlaps = self._longest is not None or visible.window is not None
        wide = torch.promote_types(k.dtype, torch.float32) if overlaps else k.dtype
        dq, dk, dv = _by_position(q), _by_position(k, wide), _by_position(v, wide)
        if overlaps:
            dk.zero_()
            dv.zero_()
        for rows, pair, mask in self._pairs(q, visible):
            queries, keys = (rows, slice(None), slice(*pair.queries)), (rows, slice(None), slice(*pair.keys))
            seen = PairInputs(q[queries], k[keys], v[keys], pair.kind is Kind.CAUSAL, mask)
            grads = self._kernel.backward(seen, dy[queries], (out[queries], lse[queries]))
            dq[queries] = grads[0]
            for total, part in zip((dk, dv), grads[1:], strict=True):
                (total[keys].add_ if overlaps else total[keys].copy_)(part)
            del grads, part  # before those of the next pair are computed
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _pairs(self, q: Tensor, visible: Visible) -> Iterator[tuple[slice, Pair, Tensor | None]]:
        """Yield sequences, pair and mask; pairs of the same shape and place in their documents share a mask."""
        masks: dict[object, Tensor] = {}
        for same in sequence_pairs(q.shape[0], q.shape[2], visible.starts, visible.window, self._longest):
            for pair in same.pairs:
                mask = None
                if pair.kind is Kind.MASKED:
                    (low, high), (first, last) = pair.queries, pair.keys
                    cuts = tuple(start - first for start in same.starts if first < start < high)
                    place = (high - low, last - first, low - first, cuts)
                    if place not in masks:
                        masks[place] = visible.mask(same.rows[0], range(low, high), range(first, last), q.device)
                    mask = masks[place]
                yield slice(*same.rows), pair, mask


def _by_position(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of this shape [B, heads, S, D] with the heads of a position next to one another."""
    batch, num_heads, seq, size = like.shape
    return like.new_empty((batch, seq, num_heads, size), dtype=dtype).transpose(1, 2)


class VariableLength:
    """Flash attention over all documents of all sequences in one kernel; bf16 and fp16 on GPUs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        bounds, longest = document_bounds(visible.starts, q.shape[0], q.shape[2], q.device)
        out, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
            *map(_tokens, (q, k, v)), bounds, bounds, longest, longest, 0.0, True, False, **_window(visible)
        )
        return _sequences(out, len(q)), lse_NT.unflatten(1, (len(q), -1)).transpose(0, 1)

    def backward(self, dy: Tensor, saved: Saved, visible: Visible) -> Grads:
        q, k, v, out, lse = saved
        bounds, longest = document_bounds(visible.starts, q.shape[0], q.shape[2], q.device)
        lse_NT = lse.transpose(0, 1).flatten(1).contiguous()
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is 0
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *map(_tokens, (dy, q, k, v, out)),
            *(lse_NT, bounds, bounds, longest, longest, 0.0, True, unused, unused),
            **_window(visible),
        )
        return _sequences(dq, len(q)), _sequences(dk, len(q)), _sequences(dv, len(q))


VARIABLE_LENGTH = VariableLength()


@lru_cache(maxsize=16)
def document_bounds(
    starts: tuple[Starts, ...] | None, batch: int, seq_length: int, device: torch.device
) -> tuple[Tensor, int]:
    """Return the bounds of all documents among the tokens, int32 on the device, and the longest document.

    All layers of a step, forward and backward, share one copy to the device.
    """
    every = starts or ((),) * batch
    places = [row * seq_length + start for row in range(batch) for start in (0, *every[row])] + [batch * seq_length]
    bounds = torch.tensor(places, dtype=torch.int32)
    longest = int(bounds.diff().max())
    return (bounds.pin_memory() if device.type != "cpu" else bounds).to(device, non_blocking=True), longest


def _tokens(x: Tensor) -> Tensor:
    """Return [B * S, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _sequences(x: Tensor, num_sequences: int) -> Tensor:
    """Return [B, heads, S, D] from [B * S, heads, D]."""
    found: Tensor = x.unflatten(0, (num_sequences, -1)).transpose(1, 2)
    return found


def _window(visible: Visible) -> dict[str, int]:
    """Return Megatron's pair of positions to the left and right of a query, itself not counted."""
    return {} if visible.window is None else {"window_size_left": visible.window - 1, "window_size_right": 0}


class KernelChoice(NamedTuple):
    """Kernel, its name in the start-up report, and whether it can compute attention of q [B, N, S, D] and k."""

    name: str
    kernel: Kernel
    supports: Callable[[Tensor, Tensor], bool]


def has_flash(q: Tensor, k: Tensor) -> bool:
    """Return whether flash attention computes attention of q [B, N, S, D] and k on their device.

    torch answers for `scaled_dot_product_attention`, which pads heads to multiples of 8 features; the kernel does not.
    """
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, q.shape[1] != k.shape[1])
    return q.device.type != "cpu" and q.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params)


KERNELS = (
    KernelChoice("flash by pairs of rows", ByPairs(CPU), lambda q, k: q.device.type == "cpu"),
    KernelChoice("variable-length flash", VARIABLE_LENGTH, has_flash),
    KernelChoice("plain matmuls by pairs of rows", ByPairs(PLAIN, LONGEST), lambda q, k: True),
)


def choose(q: Tensor, k: Tensor, softcap: float | None = None) -> KernelChoice:
    """Return the first kernel of `KERNELS` that supports q and k; where scores are capped, plain matmuls."""
    if softcap is not None:
        return KernelChoice("plain matmuls by pairs of rows", ByPairs(PlainKernel(softcap), LONGEST), lambda q, k: True)
    return next(choice for choice in KERNELS if choice.supports(q, k))
