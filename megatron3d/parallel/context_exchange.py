"""Exchanges between context ranks (`cp_comm_type`): what each sends, in closed form.

    all_gather    keys and values of all ranks, their gradients reduce-scattered (Llama 3, arXiv:2407.21783)
    p2p           keys and values round a ring, in backward with their gradients (Liu et al. 2023, arXiv:2310.01889)
    a2a           positions for heads, and back (Jacobs et al. 2023, arXiv:2309.14509)
    a2a+p2p       a2a over the inner axis, p2p over the outer one (Fang and Zhao 2024, arXiv:2405.07719)

Of c ranks, each has q elements of queries and k elements of keys, as many of values.  In units of elements, each sends

                  forward                      backward
    all_gather    2 k (c - 1)                  2 k (c - 1)
    p2p           2 k (c - 1)                  4 k (c - 1), one half in fp32 or wider
    a2a           (2 q + 2 f k) (c - 1) / c    as forward

Each key/value head of `a2a` is copied f times, where there are fewer of them than ranks, so that ranks divide them.

All but `p2p` exchange heads in p parts of equal size, each in flight during the attention of the part before: the first
part of what comes before attention, and the last part of what follows it, remain exposed.  Attention that is recomputed
keeps its output: `all_gather` repeats its forward, `p2p` sends nothing, `a2a` sends 2 q + 2 f k, the output as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron3d.parallel.attention_pairs import Pair, Span, num_pair_scores, own_pairs, pairs, segments
from megatron3d.parallel.context import TokenOrder
from megatron3d.parallel.context_ring import RingPlan, Starts, plan_of_sequences, sequence_chunks
from megatron3d.parallel.document_chunks import Chunks, joined
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh

# Most parts of an exchange: more parts hide more of it behind attention, in smaller messages.
MOST_PARTS = 4
GATHER, RING, HEADS, BOTH = "all_gather", "p2p", "a2a", "a2a+p2p"


def ring_axes(exchange: str, context: Axes) -> Axes:
    """Return the context axes along which keys and values move round a ring."""
    return {GATHER: (), RING: context, HEADS: (), BOTH: context[:1]}[exchange]


def head_axes(exchange: str, context: Axes) -> Axes:
    """Return the context axes over which positions are exchanged for heads."""
    return {GATHER: (), RING: (), HEADS: context, BOTH: context[1:]}[exchange]


def key_copies(num_groups: int, ranks: int) -> int:
    """Return how often each key/value head is copied, so that `ranks` divides the copies."""
    return ranks // math.gcd(num_groups, ranks)


def held_chunks(order: TokenOrder, seq_length: int, num_inner: int, starts: tuple[int, ...] = ()) -> Chunks:
    """Return the chunks of each rank of the ring, which are those of its `num_inner` inner ranks together."""
    ranks, every = range(0, order.num_ranks, num_inner), order.held(seq_length, starts)
    inner = [every[rank : rank + num_inner] for rank in ranks]
    if order.by_documents and starts:
        return tuple(joined([chunk for chunks in held for chunk in chunks]) for held in inner)
    return tuple(tuple((min(part)[0], max(part)[1]) for part in zip(*held, strict=True)) for held in inner)


class HeadPart(NamedTuple):
    """Consecutive query heads and the key/value heads that they read, as half-open ranges; exchanged at once."""

    queries: Span
    groups: Span


def num_parts(num_groups: int) -> int:
    """Return in how many parts key/value heads are exchanged: each is in flight during attention of the one before."""
    return next(count for count in range(min(MOST_PARTS, num_groups), 0, -1) if num_groups % count == 0)


def head_parts(group_of_query: Sequence[int], count: int) -> tuple[HeadPart, ...]:
    """Return `count` parts of a rank's heads; `group_of_query`, ascending, is the key/value head of each query head."""
    size = (group_of_query[-1] + 1) // count
    bounds = [bisect_left(group_of_query, place * size) for place in range(count + 1)]
    return tuple(HeadPart(span, (place * size, (place + 1) * size)) for place, span in enumerate(pairwise(bounds)))


@dataclass(frozen=True)
class ExchangeSizes:
    """Sizes of the tensors that one exchange sends.

    Attributes:
        queries: elements of this rank's queries.
        keys: elements of its keys, as many as of its values.
        num_groups: its key/value heads.
        steps: steps of the ring; None: all, as without windows.
        in_parts: heads are exchanged in parts.
    """

    queries: float
    keys: float
    num_groups: int
    itemsize: int
    steps: int | None = None
    in_parts: bool = True

    def num_parts(self, exchange: str, num_head_ranks: int) -> int:
        """Return the number of parts in which heads are exchanged, given the ranks that exchange positions for them."""
        if exchange == RING or not self.in_parts:
            return 1
        return num_parts(self.num_groups * key_copies(self.num_groups, num_head_ranks) // num_head_ranks)


class ExchangeTraffic(NamedTuple):
    """Collectives of one exchange, in order, and the bytes that this rank sends.

    Attributes:
        calls: all of them.
        exposed: those that begin and end without attention between.
    """

    calls: list[Traffic]
    exposed: list[Traffic]


def exchange_traffic(
    exchange: str, context: Axes, sizes: ExchangeSizes, mesh: Mesh, backward: bool, again: bool = False
) -> ExchangeTraffic:
    """Return the traffic of one exchange.

    Args:
        again: it is the exchange of a forward that is recomputed from the output of attention, which is kept.
    """
    ring, heads = ring_axes(exchange, context), head_axes(exchange, context)
    ranks = mesh.size(heads)
    parts = sizes.num_parts(exchange, ranks)
    if exchange == GATHER:
        num_bytes = 2 * sizes.keys * (mesh.size(context) - 1) * sizes.itemsize / parts
        call = Traffic("reduce_scatter" if backward else "all_gather", context, num_bytes)
        return ExchangeTraffic(parts * [call], parts * [call] if again else [call])
    copied = sizes.keys * key_copies(sizes.num_groups, ranks) / parts
    steps = 0 if again else mesh.size(ring) - 1 if sizes.steps is None else sizes.steps
    moved = steps * [Traffic("shift", ring, 2 * copied * sizes.itemsize)]
    if backward:
        moved += steps * [Traffic("shift", ring, 2 * copied * max(sizes.itemsize, 4))]
    if ranks == 1:
        return ExchangeTraffic(moved, [])
    share, queries = (ranks - 1) / ranks * sizes.itemsize, sizes.queries / parts
    if again:
        calls = parts * [Traffic("all_to_all", heads, 2 * (queries + copied) * share)]
        return ExchangeTraffic(calls, calls)
    there, back = ((queries + 2 * copied) * share, queries * share)[:: -1 if backward else 1]
    sent = [Traffic("all_to_all", heads, num_bytes) for num_bytes in (there, back)]
    return ExchangeTraffic(parts * [sent[0]] + parts * [*moved, sent[1]], sent)


def exchange_ring(
    exchange: str, order: TokenOrder, seq_length: int, starts: Starts = None, window: int | None = None
) -> RingPlan:
    """Return this rank's part in the ring of an exchange; without a ring, one step with all that its heads see."""
    num_inner = order.mesh.size(head_axes(exchange, order.context))
    held = sequence_chunks(lambda documents: held_chunks(order, seq_length, num_inner, documents), starts)
    return plan_of_sequences(held, order.mesh.index(ring_axes(exchange, order.context)), window)


class GatheredPairs(NamedTuple):
    """Pairs of a rank's queries with the keys of all ranks, which are gathered in the order of positions.

    Attributes:
        own: pairs with the rank's own keys, in the order of its rows: kernels are faster with many queries at once.
        others: pairs with the keys of other ranks, in the order of positions.
        chunks: positions of the rank's own keys; none, where each sequence is divided by its own documents: then
            `others` has all pairs.
    """

    own: tuple[Pair, ...]
    others: tuple[Pair, ...]
    chunks: tuple[Span, ...]


@lru_cache(maxsize=64)
def gathered_pairs(
    order: TokenOrder, seq_length: int, starts: Starts = None, window: int | None = None
) -> GatheredPairs:
    """Return the pairs of this rank's queries with the keys of all ranks."""
    rank, is_alike = order.mesh.index(order.context), not (order.by_documents and any(starts or ()))

    def seen(documents: tuple[int, ...]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        held = order.held(seq_length, documents)
        every = segments(sorted(chunk for chunks in held for chunk in chunks), documents, window)
        mine = segments(held[rank], documents, window)
        if not is_alike:
            return (), pairs(mine, every, window)
        first = {segment.first for segment in mine}
        others = [segment for segment in every if segment.first not in first]
        return own_pairs(mine, window), pairs(mine, others, window)

    chunks = joined(order.chunks(seq_length)) if is_alike else ()
    if starts is None:
        return GatheredPairs(*seen(()), chunks)
    own, others = list[Pair](), list[Pair]()
    for row, each in enumerate(starts):
        for found, some in zip((own, others), seen(each), strict=True):
            found += [pair._replace(sequences=(row, row + 1)) for pair in some]
    return GatheredPairs(tuple(own), tuple(others), chunks)


def scores_computed(
    exchange: str,
    order: TokenOrder,
    seq_length: int,
    backward: bool,
    window: int | None = None,
    longest: int | None = None,
    starts: Starts = None,
) -> Fraction:
    """Return the scores that a rank computes for each sequence and each of its heads.

    Of sequences whose documents begin at `starts` it is the mean.

    Kernels, which take at most `longest` queries at once, are counted whole where they are causal or masked.  Ranks
    that exchange heads have a share of them.
    """
    if window is not None or longest is not None or starts is not None:
        return _scores_of_pairs(exchange, order, seq_length, backward, window, longest, starts)
    # Of 2 o chunks over o ranks, a rank's own two are computed as one causal pair, but in a ring's backward each alone.
    over = order.context if exchange == GATHER else ring_axes(exchange, order.context)
    ranks, shared = (order.mesh.size(axes) for axes in (over, head_axes(exchange, order.context)))
    chunks = 2 * ranks + (1 if backward and exchange != GATHER else 2)
    return Fraction(chunks * (seq_length // 2 // ranks) ** 2, shared)


@lru_cache(maxsize=256)
def _scores_of_pairs(
    exchange: str,
    order: TokenOrder,
    seq_length: int,
    backward: bool,
    window: int | None,
    longest: int | None,
    starts: Starts,
) -> Fraction:
    """Return the scores of the pairs that a window and documents leave, the mean over the sequences of `starts`."""
    count = len(starts or ((),))
    if exchange == GATHER:
        found = gathered_pairs(order, seq_length, starts, window)
        return Fraction(num_pair_scores((*found.own, *found.others), longest), count)
    plan = exchange_ring(exchange, order, seq_length, starts, window)
    own = plan.own_parts if backward else (plan.own,)
    every = (*own, *(step.pairs for step in plan.steps))
    scores = sum(num_pair_scores(each, longest) for each in every)
    return Fraction(scores, count * order.mesh.size(head_axes(exchange, order.context)))
