"""Causal attention whose sequences are split over context ranks: exchanges of keys and values.

A rank has the queries, keys and values of its own positions (`parallel/context.py`).  An exchange of `EXCHANGES` gives
its queries the keys that they may see.  `all_gather` collects all keys and values in the order of positions, as Llama 3
does (arXiv:2407.21783, section 3.3.2): with grouped queries they are small, and their gradients return by one
reduce-scatter.

Letters: B sequences, L positions of this rank, S positions of whole sequences, N query heads, G key/value heads,
D features of a head, C context ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.attention import AttentionHeads, Drop, WeightDropout, attention_with_dropout
from megatron3d.ops.attention_pairs import Merged, MergedGrads
from megatron3d.ops.attention_softmax import PLAIN_SOFTMAX, Softmax, add_sink, sink_grad
from megatron3d.ops.capped_attention import capped_kernel
from megatron3d.ops.head_exchange import HeadExchange
from megatron3d.ops.packed_attention import Visible
from megatron3d.ops.ring_attention import ring_attention
from megatron3d.parallel.attention_pairs import Pair, Span
from megatron3d.parallel.context import CONTEXT_EXCHANGES, TokenOrder
from megatron3d.parallel.context_exchange import (
    BOTH,
    HEADS,
    RING,
    exchange_ring,
    gathered_pairs,
    head_axes,
    held_chunks,
    ring_axes,
)


@dataclass(frozen=True)
class ContextAttention:
    """Inputs of an exchange besides queries, keys and values.

    Attributes:
        order: says which positions each context rank holds.
        heads: heads of this rank.
        seq_length: positions of a whole sequence.
        visible: documents and window of the sequences.
        drop: dropout of the attention weights.
        softmax: how scores become weights.
    """

    comm: Comm
    order: TokenOrder
    heads: AttentionHeads
    seq_length: int
    visible: Visible
    drop: Drop | None = None
    softmax: Softmax = PLAIN_SOFTMAX


def context_attention(q_BLND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, exchange: str, at: ContextAttention) -> Tensor:
    """Return causal attention of this rank's positions, [M, N * D], by an entry of `EXCHANGES`."""
    y_BNLD = EXCHANGES[exchange](q_BLND.transpose(1, 2), k_BLGD, v_BLGD, at)
    return y_BNLD.transpose(1, 2).flatten(0, 1).flatten(1)


def _all_gather(q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, at: ContextAttention) -> Tensor:
    """All-gather keys and values, and attend to those that each chunk of queries may see."""
    kv_BSGD: Tensor = _GatherPositions.apply(torch.stack((k_BLGD, v_BLGD)), at.order, at.seq_length, at.comm)
    kv = kv_BSGD.transpose(2, 3)
    if not at.heads.are_even:
        kv = kv[:, :, at.heads.group_of_query]
    if at.drop is not None:
        dropped = WeightDropout(at.drop, at.heads, at.seq_length, at.visible, at.softmax)
        return attention_with_dropout(q_BNLD, kv[0], kv[1], dropped, at.order.chunks(at.seq_length))
    seen = gathered_pairs(at.order, at.seq_length, at.visible.starts, at.visible.window)
    y_BNLD: Tensor = _AttendPairs.apply(q_BNLD, kv, at.softmax.sink_N, at.softmax.softcap, seen, at.visible.window)
    return y_BNLD


class _AttendPairs(torch.autograd.Function):
    """Attention [B, N, L, D] by pairs of rows; keeps queries, keys, values, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BNLD: Tensor,
        kv: Tensor,
        sink_N: Tensor | None,
        softcap: float | None,
        seen: tuple[Pair, ...],
        window: int | None,
    ) -> Tensor:
        ctx.seen, ctx.window, ctx.kernel = seen, window, capped_kernel(softcap)
        merged = Merged(q_BNLD, window, ctx.kernel)
        merged.add(kv, seen)
        out, lse = add_sink(*merged.result(), sink_N)
        y = out.to(q_BNLD.dtype)
        ctx.save_for_backward(q_BNLD, kv, sink_N, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink_N, y, lse = ctx.saved_tensors
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        grads = MergedGrads(dy, q, (y, lse), ctx.window, ctx.kernel)
        grads.add(kv, dkv, ctx.seen)
        return grads.dq.to(q.dtype), dkv.to(kv.dtype), sink_grad(dy, y, lse, sink_N), None, None, None


class _GatherPositions(torch.autograd.Function):
    """All-gather [2, B, L, G, D] over the context ranks to [2, B, S, G, D] in the order of positions."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, order: TokenOrder, seq_length: int, comm: Comm) -> Tensor:
        axes = comm.mesh.nontrivial(order.context)
        ctx.places, ctx.axes, ctx.comm = _places(order, seq_length), axes, comm
        by_rank = comm.all_gather(kv.unsqueeze(0), axes, dim=0).wait()
        return torch.cat([by_rank[rank, :, :, rows] for _, rank, rows in sorted(ctx.places, key=lambda p: p[0])], dim=2)

    @staticmethod
    def backward(ctx: Any, dkv: Tensor) -> tuple[Tensor | None, ...]:
        by_rank = dkv.new_empty((ctx.comm.mesh.size(ctx.axes), *dkv.shape[:2], _local(dkv, ctx), *dkv.shape[3:]))
        for low, rank, rows in ctx.places:
            by_rank[rank, :, :, rows] = dkv[:, :, low : low + rows.stop - rows.start]
        return ctx.comm.reduce_scatter(by_rank, ctx.axes, dim=0).wait().squeeze(0), None, None, None


def _local(whole: Tensor, ctx: Any) -> int:
    return int(whole.shape[2]) // int(ctx.comm.mesh.size(ctx.axes))


def _places(order: TokenOrder, seq_length: int) -> list[tuple[int, int, slice]]:
    """Return for every chunk of a sequence its first position, the context rank that holds it, and its rows there."""
    found = []
    for rank in range(order.num_ranks):
        start = 0
        for low, high in order.chunks(seq_length, rank):
            found.append((low, rank, slice(start, start + high - low)))
            start += high - low
    return found


def _ring_and_heads(exchange: str, q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, at: ContextAttention) -> Tensor:
    """Exchange positions for heads over some of the context axes, and attend in a ring over the others."""
    assert at.drop is None, f"{exchange} takes no dropout"
    comm, context = at.comm, at.order.context
    ring, heads = ring_axes(exchange, context), head_axes(exchange, context)
    q, k, v = q_BNLD, k_BLGD.transpose(1, 2), v_BLGD.transpose(1, 2)
    if not at.heads.are_even:
        k, v = (t[:, at.heads.group_of_query] for t in (k, v))
    plan = exchange_ring(exchange, at.order, at.seq_length, at.visible.starts, at.visible.window)
    if not heads:
        return ring_attention(q, k, v, plan, ring, comm, at.softmax)
    chunks = held_chunks(at.order, at.seq_length, comm.mesh.size(heads))[comm.mesh.index(ring)]
    moved = HeadExchange(_held_within(at, chunks, comm.mesh.size(heads)), heads, comm)
    softmax = at.softmax._replace(sink_N=moved.own_heads(at.softmax.sink_N))
    return moved.own_positions(ring_attention(*moved.whole_positions(q, k, v), plan, ring, comm, softmax))


def _held_within(at: ContextAttention, joined: tuple[Span, ...], num_inner: int) -> tuple[tuple[Span, ...], ...]:
    """Return the chunks of each inner rank, of those that together hold this rank's chunks of the ring."""
    every = (at.order.chunks(at.seq_length, rank) for rank in range(at.order.num_ranks))
    inside = tuple(each for each in every if any(low <= each[0][0] < high for low, high in joined))
    assert len(inside) == num_inner, "inner ranks hold the chunks of their ring rank"
    return inside


Exchange = Callable[[Tensor, Tensor, Tensor, ContextAttention], Tensor]
EXCHANGES: Mapping[str, Exchange] = {
    "all_gather": _all_gather,
    **{exchange: partial(_ring_and_heads, exchange) for exchange in (RING, HEADS, BOTH)},
}
assert tuple(EXCHANGES) == CONTEXT_EXCHANGES, "the table of exchanges is not that of the configuration"
