"""Causal attention whose sequences are split over context ranks: one function for every exchange (`cp_comm_type`).

A rank has the queries, keys and values of its own positions (`plan.py`).  An exchange brings the queries of
some heads what they may see, in parts of consecutive heads, whose numbers do not depend on one another:

    forward     every part in flight | attention of part 0, its output on its way | attention of part 1 ...
    backward    every part in flight | gradients of part 0, on their way home | gradients of part 1 ...

so that only the first part's way there and the last part's way back are exposed.

In generation rank p mod c of c holds position p, in slot p // c of its KV cache.  New queries, keys and values are
all-gathered; each rank keeps the keys of its positions, attends all new queries to all that it keeps, and sends each
rank the partial outputs of its tokens, which are merged by their log-sum-exp (Dao et al. 2022, arXiv:2205.14135).  So a
prompt's keys are stored once, prefill and decode are one path, and every rank computes the same number of scores.

Letters: B sequences, L positions of this rank, S positions of whole sequences, W new tokens of each, T slots of this
rank's cache, N query heads, G key/value heads, D features of a head, C context ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron3d.attention.attention import AttentionHeads, WeightDropout, attention_with_dropout
from megatron3d.attention.context.exchanges import (
    Exchange,
    Gathered,
    HeadExchange,
    Operands,
    Result,
    Ring,
    RingAndHeads,
    gather_positions,
)
from megatron3d.attention.context.order import ChunkOrder, HeldPositions, PositionOrder
from megatron3d.attention.context.plan import (
    BOTH,
    CONTEXT_EXCHANGES,
    GATHER,
    HEADS,
    RING,
    HeadPart,
    TokenOrder,
    exchange_ring,
    gathered_pairs,
    head_axes,
    held_chunks,
    ring_axes,
)
from megatron3d.attention.kv_cache import CacheView
from megatron3d.attention.packed import Visible
from megatron3d.attention.pairs import (
    PLAIN_SOFTMAX,
    Drop,
    DroppedPairs,
    InPieces,
    PairInputs,
    PairKernel,
    PlainKernel,
    Softmax,
    add_sink,
    capped_kernel,
    sink_grad,
)
from megatron3d.attention.plan import DROPOUT_PIECE, DROPOUT_ROWS
from megatron3d.comm.interface import Comm
from megatron3d.ops.recompute import recomputed, saved_by_autograd


class KeptResult:
    """Output and log-sum-exp of attention that is recomputed for backward.

    The output is the input of the output projection, which keeps it: with a number per row of scores, backward needs
    queries, keys and values again, but neither attention nor its output's exchange.
    """

    def __init__(self) -> None:
        self._found: Callable[[], tuple[Tensor, ...]] | None = None

    def put(self, y_MF: Tensor, lse: Tensor) -> None:
        """Keep the result of forward."""
        found = y_MF.detach(), lse
        self._found = lambda: found

    def save(self) -> None:
        """Let autograd save what is kept, outside the function that is recomputed, so that it may be offloaded."""
        if self._found is not None:
            self._found = saved_by_autograd(*self._found())

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return what forward has kept, once; None in forward."""
        found, self._found = self._found, None
        if found is None:
            return None
        y_MF, lse = found()
        return y_MF, lse


def recomputed_attention(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args, kept), recomputed for backward from its arguments and the attention that `kept` keeps."""
    kept = KeptResult()
    y_MF = recomputed(function, *args, kept)
    kept.save()
    return y_MF


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
        kept: keeps the result where attention is recomputed.
        held: positions of each rank where sequences are divided by their documents.
    """

    comm: Comm
    order: TokenOrder
    heads: AttentionHeads
    seq_length: int
    visible: Visible
    drop: Drop | None = None
    softmax: Softmax = PLAIN_SOFTMAX
    kept: KeptResult | None = None
    held: HeldPositions | None = None

    def positions(self, first: int, num_ranks: int) -> PositionOrder:
        """Return the order of the positions of `num_ranks` context ranks, from rank `first` on."""
        if self.held is not None:
            return self.held.among(first, num_ranks)
        return ChunkOrder(self.order.held(self.seq_length)[first : first + num_ranks])

    @property
    def all_positions(self) -> PositionOrder:
        """The order of the positions of whole sequences."""
        return self.positions(0, self.order.num_ranks)


def context_attention(q_BLND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, exchange: str, at: ContextAttention) -> Tensor:
    """Return causal attention of this rank's positions, [M, N * D], by an entry of `EXCHANGES`."""
    q_BNLD = q_BLND.transpose(1, 2)
    if at.drop is not None and exchange == GATHER:
        return _by_token(_with_dropout(q_BNLD, k_BLGD, v_BLGD, at, at.drop))
    moves = EXCHANGES[exchange](exchange, at, len(q_BLND))
    if not at.heads.are_even and exchange != GATHER:
        k_BLGD, v_BLGD = (t[:, :, at.heads.group_of_query] for t in (k_BLGD, v_BLGD))
    found = at.kept.take() if at.kept else None
    result = None if found is None else (found[0].view(q_BLND.shape).transpose(1, 2), found[1])
    y_BNLD, lse = attend_by(moves, q_BNLD, k_BLGD, v_BLGD, at.softmax, result)
    y_MF = _by_token(y_BNLD)
    if at.kept and result is None and torch.is_grad_enabled():
        at.kept.put(y_MF, lse)
    return y_MF


def attend_by(
    moves: Exchange,
    q_BNLD: Tensor,
    k_BLGD: Tensor,
    v_BLGD: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    result: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, L, D] of this rank's positions, and its log-sum-exp, which has no gradient.

    `result` is what the call that is recomputed has returned: only what its gradients need is brought again.
    """
    y_BNLD, lse = _Attend.apply(q_BNLD, k_BLGD, v_BLGD, softmax.sink_N, softmax.softcap, moves, result)
    return y_BNLD, lse


def _by_token(y_BNLD: Tensor) -> Tensor:
    return y_BNLD.transpose(1, 2).flatten(0, 1).flatten(1)


def _with_dropout(q_BNLD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, at: ContextAttention, drop: Drop) -> Tensor:
    """Gather keys and values, and attend with dropout of the weights."""
    both = gather_positions(torch.cat((k_BLGD, v_BLGD), dim=2), at.order.context, at.all_positions, at.comm)
    kv = both.unflatten(1, (2, -1)).transpose(0, 1)
    if not at.heads.are_even:
        kv = kv[:, :, at.heads.group_of_query]
    if at.held is None:
        dropped = WeightDropout(drop, at.heads, at.seq_length, at.visible, at.softmax)
        return attention_with_dropout(q_BNLD, kv[0], kv[1], dropped, at.order.chunks(at.seq_length))
    rank, found = at.order.mesh.index(at.order.context), []
    for row, chunks in enumerate(at.held.chunks):
        one, seen = slice(row, row + 1), Visible(at.held.starts[row : row + 1], at.visible.window)
        of_row = replace(drop, first_sequence=drop.first_sequence + row)
        dropped = WeightDropout(of_row, at.heads, at.seq_length, seen, at.softmax)
        found.append(attention_with_dropout(q_BNLD[one], kv[0, one], kv[1, one], dropped, chunks[rank]))
    return torch.cat(found)


class _Attend(torch.autograd.Function):
    """Attention [B, N, L, D] and its log-sum-exp by parts of heads; keeps each part's operands, output and lse.

    Outputs are saved as views of `.data`: fake tensors would keep the graph alive that owns what is viewed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BNLD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        sink_N: Tensor | None,
        softcap: float | None,
        moves: Exchange,
        result: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        kernel = capped_kernel(softcap)
        coming = [moves.bring(part, q_BNLD, k_BLGD, v_BLGD, result) for part in moves.parts]
        saved, returning = list[Tensor](), list[Callable[[], Tensor]]()
        for part, wait in zip(moves.parts, coming, strict=True):
            operands, done = wait()
            if done is None:
                out, lse = moves.attend(part, operands, kernel)
                out, lse = add_sink(out, lse, moves.sinks(part, sink_N))
                done = out.to(q_BNLD.dtype), lse
                returning.append(moves.send_output(done[0]))
            saved += [*operands, *done]
        if result is None:
            lse = torch.cat(saved[3::4], dim=1) if len(moves.parts) > 1 else saved[3]
            result = moves.join_output([wait() for wait in returning]), lse
            whole = result[0].data
            saved[2::4] = [moves.kept_output(*each, whole) for each in zip(moves.parts, saved[2::4], strict=True)]
        else:
            result = result[0].data, result[1]
        ctx.moves, ctx.kernel = moves, kernel
        ctx.save_for_backward(sink_N, *saved)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        sink_N, *saved = ctx.saved_tensors
        moves: Exchange = ctx.moves
        coming = [moves.bring_grad(part, dy) for part in moves.parts]
        dsink_N = None if sink_N is None else torch.zeros_like(sink_N)
        returning = []
        for place, (part, wait) in enumerate(zip(moves.parts, coming, strict=True)):
            q, kv, y, lse = saved[4 * place : 4 * place + 4]
            dy_part = wait()
            found, into = sink_grad(dy_part, y, lse, moves.sinks(part, sink_N)), moves.sinks(part, dsink_N)
            if found is not None and into is not None:
                into.copy_(found)
            grads = _gradients(moves, part, Operands(q, kv), (y, lse), dy_part, ctx.kernel)
            returning.append(moves.send_grads(part, grads))
            del dy_part, grads  # before those of the next part are computed
        dq, dk, dv = moves.join_grads([wait() for wait in returning])
        return dq, dk, dv, dsink_N, None, None, None


def _gradients(
    moves: Exchange, part: HeadPart, operands: Operands, result: Result, dy: Tensor, kernel: PairKernel | None
) -> Operands:
    """Return the gradients of a part's operands in their dtypes; those in fp32 are freed."""
    dq, dkv = moves.attend_backward(part, operands, result, dy, kernel)
    return Operands(dq.to(operands.q.dtype), dkv.to(operands.kv.dtype))


def _gathered(exchange: str, at: ContextAttention, num_sequences: int) -> Exchange:
    seen = gathered_pairs(at.order, at.seq_length, at.visible.starts, at.visible.window)
    return Gathered(at.order.context, at.all_positions, at.heads.group_of_query, seen, at.visible.window, at.comm)


def _ring_and_heads(exchange: str, at: ContextAttention, num_sequences: int) -> Exchange:
    """Return the exchange of positions for heads over some of the context axes, with a ring over the others."""
    comm, context, starts = at.comm, at.order.context, at.visible.starts
    ring, heads = ring_axes(exchange, context), head_axes(exchange, context)
    plan = exchange_ring(exchange, at.order, at.seq_length, starts, at.visible.window)
    place, num_inner = comm.mesh.index(ring), comm.mesh.size(heads)
    num_heads, (first, last) = len(at.heads.group_of_query), at.heads.group_span
    num_groups, dropped = last - first if at.heads.are_even else num_heads, None
    if at.drop is not None:
        chunks = tuple(held_chunks(at.order, at.seq_length, num_inner, each) for each in starts or ((),))
        softcap, length = at.softmax.softcap, at.seq_length
        dropped = DroppedPairs(at.drop, softcap, at.heads, num_sequences, length, chunks=chunks, place=place)
        plan = plan if at.seq_length <= DROPOUT_ROWS else plan.in_pieces(DROPOUT_PIECE)
    if not heads:
        return Ring(num_heads, num_groups, plan, ring, comm, dropped=dropped)
    moved = HeadExchange(at.positions(place * num_inner, num_inner), heads, comm)
    is_whole = not ring and at.drop is None and at.softmax.softcap is None
    whole = at.visible if is_whole else None
    return RingAndHeads(num_heads, num_groups, moved, plan, ring, comm, dropped=dropped, whole=whole)


EXCHANGES: Mapping[str, Callable[[str, ContextAttention, int], Exchange]] = {
    GATHER: _gathered,
    **dict.fromkeys((RING, HEADS, BOTH), _ring_and_heads),
}
assert tuple(EXCHANGES) == CONTEXT_EXCHANGES, "the table of exchanges is not that of the configuration"


# Queries whose scores are in memory at once.
PIECE = 256


def cached_context_attention(
    q_BLND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, at: ContextAttention, cached: CacheView, site: str
) -> Tensor:
    """Return causal attention of this rank's new tokens, [M, N * D], after extending the cache of a layer by them."""
    order = at.order
    q_BNWD = gather_positions(q_BLND, order.context, at.all_positions, at.comm)
    kv = gather_positions(torch.cat((k_BLGD, v_BLGD), dim=2), order.context, at.all_positions, at.comm)
    k_BWGD, v_BWGD = (t.transpose(1, 2) for t in kv.chunk(2, dim=1))
    rank, ranks = at.comm.mesh.index(order.context), order.num_ranks
    k, v, mask_BWT = cached.extend(site, k_BWGD, v_BWGD, at.visible.window, rank, ranks)
    k_BGTD, v_BGTD = k.transpose(1, 2), v.transpose(1, 2)
    if not at.heads.are_even:
        k_BGTD, v_BGTD = (t[:, at.heads.group_of_query] for t in (k_BGTD, v_BGTD))
    kernel = InPieces(PlainKernel(at.softmax.softcap), PIECE)
    out, lse = kernel.forward(PairInputs(q_BNWD, k_BGTD, v_BGTD, False, mask_BWT[:, None, None]))
    out_BNLD, lse_BNL = _merged(torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), dim=-1), at)
    y_BNLD, _ = add_sink(out_BNLD, lse_BNL, at.softmax.sink_N)
    return _by_token(y_BNLD.to(q_BLND.dtype))


def _merged(parts: Tensor, at: ContextAttention) -> tuple[Tensor, Tensor]:
    """Return output [B, N, L, D] and log-sum-exp of this rank's tokens, from what every rank has of all, [B, N, W, E].

    The last of E features is the log-sum-exp.
    """
    by_rank = at.all_positions.scattered(parts)
    axes = at.comm.mesh.nontrivial(at.order.context)
    received = at.comm.all_to_all(by_rank, axes).wait()  # [C, B, N, L, E]
    out, lse = received[..., :-1], received[..., -1]
    total = lse.logsumexp(0)
    return (out * (lse - total).exp().unsqueeze(-1)).sum(0), total
