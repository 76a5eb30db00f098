"""Context parallelism as values: the positions of a rank, the pairs that it multiplies, and what each exchange sends.

Causal attention gives later positions more work.  So a sequence is cut into 2 c chunks, and of c ranks rank r holds the
chunks r and 2 c - 1 - r ("zigzag", as in Llama 3, arXiv:2407.21783, section 3.3.2, and Brandon et al. 2023,
arXiv:2311.09431):

    chunk of the sequence     0  1  2  3  4  5  6  7
    context rank              0  1  2  3  3  2  1  0

Packed documents may be divided by their own work, the keys that their queries see: n k equal chunks, the heaviest
first, go to the rank with the least work that has fewer than k (dealt by a heap as in MagiAttention, Sand AI 2025,
github.com/SandAI-org/MagiAttention).  Of zigzag and growing k the first whose busiest rank is near the mean is taken.
Everything that depends on a position takes it from `TokenOrder`: rotary and learned positions, labels, dropout masks.

A ring multiplies its own keys and values in step 0, in step s those of rank r - s.  A step in which no rank sees
anything is left out: keys and values move past it in one transfer, so all ranks need the same steps.

`cp_comm_type`, of c ranks with q elements of queries and k of keys each, in elements that each sends:

                  forward                      backward
    all_gather    2 k (c - 1)                  2 k (c - 1)                               arXiv:2407.21783
    p2p           2 k (c - 1)                  4 k (c - 1), one half in fp32 or wider    Liu et al., arXiv:2310.01889
    a2a           (2 q + 2 f k) (c - 1) / c    as forward                                Jacobs et al., arXiv:2309.14509
    a2a+p2p       a2a over the inner axis, p2p over the outer one                        Fang and Zhao, arXiv:2405.07719

Each key/value head of `a2a` is copied f times, where there are fewer of them than ranks, so that ranks divide them.
All but `p2p` exchange heads in p parts of equal size, each in flight during the attention of the part before: the first
part of what comes before attention, and the last part of what follows it, remain exposed.  Attention that is recomputed
keeps its output: `all_gather` repeats its forward, `p2p` sends nothing, `a2a` sends 2 q + 2 f k, the output as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron3d.attention.plan import (
    Pair,
    Segment,
    Span,
    cut,
    equal_documents,
    num_pair_scores,
    own_pairs,
    pairs,
    seen,
    segments,
)
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.modes.mode import Mode

# Positions of each context rank, as half-open chunks in ascending order.
Chunks = tuple[tuple[Span, ...], ...]

# Chunks of a rank that are tried, and the work of the busiest rank, over the mean, at which no more are.
COUNTS, NEAR = (2, 4, 8, 16), 1.02
# Chunks of fewer positions are not made of long sequences: attention of few rows is mostly overhead.
SHORTEST_CHUNK = 128


Work = Callable[[int], int]


def work_before(seq_length: int, starts: Sequence[int], window: int | None = None) -> Work:
    """Return a function of a position: the pairs of an earlier query and a key that it sees.

    Args:
        starts: first positions of the documents after the first one, ascending.
        window: number of keys that a query sees, itself included.
    """
    bounds = (0, *starts, seq_length)
    before = (0, *accumulate(_seen(high - low, window) for low, high in pairwise(bounds)))

    def until(position: int) -> int:
        document = min(bisect_right(bounds, position), len(bounds) - 1) - 1
        return before[document] + _seen(position - bounds[document], window)

    return until


def rank_work(chunks: Sequence[Span], until: Work) -> int:
    """Return the pairs of a query and a key that it sees, of the queries of a rank's chunks."""
    return sum(until(high) - until(low) for low, high in chunks)


def imbalance(chunks: Chunks, until: Work) -> float:
    """Return the work of the busiest rank over the mean."""
    work = [rank_work(each, until) for each in chunks]
    return max(work) * len(work) / sum(work)


@lru_cache(maxsize=1024)
def balanced_chunks(zigzag: Chunks, starts: tuple[int, ...], window: int | None = None) -> Chunks:
    """Return the chunks of each rank by the work of the documents, or `zigzag` where these are no better.

    Every rank holds as many positions as in `zigzag`; neighbouring chunks of a rank are joined.
    """
    length = _length(zigzag)
    until = work_before(length, starts, window)
    best, least, per_rank = zigzag, imbalance(zigzag, until), length // len(zigzag)
    for count in COUNTS:
        is_long = per_rank >= count * SHORTEST_CHUNK or count <= COUNTS[1]
        if least <= NEAR or per_rank % count or not is_long:
            continue
        found = _dealt(length, len(zigzag), count, until)
        if (worst := imbalance(found, until)) < least:
            best, least = found, worst
    return best


def _dealt(length: int, num_ranks: int, count: int, until: Work) -> Chunks:
    """Return `count` chunks of equal size for each rank."""
    size = length // (num_ranks * count)
    chunks = [(low, low + size) for low in range(0, length, size)]
    work = {chunk: rank_work((chunk,), until) for chunk in chunks}
    held: list[list[Span]] = [[] for _ in range(num_ranks)]
    least = [(0, rank) for rank in range(num_ranks)]  # a heap of the ranks with fewer than `count` chunks
    for chunk in sorted(chunks, key=lambda chunk: (-work[chunk], chunk)):
        load, rank = least[0]
        held[rank].append(chunk)
        if len(held[rank]) < count:
            heapreplace(least, (load + work[chunk], rank))
        else:
            heappop(least)
    return tuple(joined(each) for each in held)


def joined(chunks: Sequence[Span]) -> tuple[Span, ...]:
    """Return chunks in ascending order, neighbours as one."""
    found: list[Span] = []
    for low, high in sorted(chunks):
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, high))
    return tuple(found)


def _seen(length: int, window: int | None) -> int:
    """Return the keys that the first `length` positions of a document see together."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def _length(chunks: Chunks) -> int:
    return sum(high - low for each in chunks for low, high in each)


# Exchanges of keys and values between context ranks by name (`cp_comm_type`); the first one is the default.
CONTEXT_EXCHANGES = ("all_gather", "p2p", "a2a", "a2a+p2p")
# How positions are divided among context ranks by name (`context_parallel_load_balancer`); the first is the default.
ZIGZAG, DOCUMENTS = LOAD_BALANCERS = ("zigzag", "documents")


def with_context(
    mode: Mode, axes: tuple[tuple[str, int], ...], exchange: str = CONTEXT_EXCHANGES[0], load_balancer: str = ZIGZAG
) -> Mode:
    """Return a mode whose tokens are split over context axes as well, behind the axes that split sequences.

    Axes of one rank change nothing, so that a layout without context parallelism has no such axis.
    """
    live = tuple((name, size) for name, size in axes if size > 1)
    if not live:
        return mode
    names = tuple(name for name, _ in live)

    def widened(plan: MatmulPlan) -> MatmulPlan:
        return replace(plan, m=plan.m + names)

    plans = widened(mode.expand), widened(mode.contract)
    mode = replace(mode, axes=live + mode.axes, expand=plans[0], contract=plans[1], context=names, exchange=exchange)
    return replace(mode, load_balancer=load_balancer)


def zigzag(seq_length: int, num_ranks: int, rank: int) -> tuple[Span, ...]:
    """Return the chunks of a sequence that context rank `rank` holds, half-open and in ascending order."""
    if num_ranks == 1:
        return ((0, seq_length),)
    size, odd = divmod(seq_length, 2 * num_ranks)
    assert not odd, f"{seq_length} positions do not make {2 * num_ranks} chunks"
    return tuple((chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * num_ranks - 1 - rank))


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a microbatch a rank holds, in which order.

    The tokens of a microbatch are ordered by the axes that split sequences, then by context rank, sequence and
    position.  Layouts split this order, and all ranks of a context group hold the same sequences.

    Attributes:
        batch: axes that split whole sequences when these are read.
        context: axes that split the positions of a sequence, the first one slowest.
        by_documents: sequences of several documents are divided by the work of their documents.
        window: number of keys that a query sees in the layers with the most work; None: all before it.
    """

    batch: Axes
    context: Axes
    mesh: Mesh
    by_documents: bool = False
    window: int | None = None

    @classmethod
    def of_mode(cls, mode: Mode, mesh: Mesh, window: int | None = None) -> TokenOrder:
        """Return the order of a mode's tokens on this rank."""
        return cls(mode.batch_axes, mode.context, mesh, mode.load_balancer == DOCUMENTS, window)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that split the positions of a sequence."""
        return self.mesh.size(self.context)

    @property
    def num_groups(self) -> int:
        """Number of groups of context ranks, which read different sequences of a microbatch."""
        return self.mesh.size(self.batch)

    def chunks(self, seq_length: int, rank: int | None = None) -> tuple[Span, ...]:
        """Return the positions that a context rank holds, this one by default, in the order of its tokens.

        They are those of a sequence of one document.
        """
        return zigzag(seq_length, self.num_ranks, self.mesh.index(self.context) if rank is None else rank)

    def held(self, seq_length: int, starts: tuple[int, ...] = ()) -> Chunks:
        """Return the positions that each context rank holds of a sequence whose further documents begin at `starts`."""
        alike = tuple(self.chunks(seq_length, rank) for rank in range(self.num_ranks))
        return balanced_chunks(alike, starts, self.window) if self.by_documents and starts else alike

    def sequences(self, num_sequences: int, axes: Axes) -> Span:
        """Return this rank's sequences of a microbatch whose tokens `axes` split."""
        return span(num_sequences, tuple(axis for axis in axes if axis not in self.context), self.mesh)

    def local_rows(self, num_sequences: int, seq_length: int, axes: Axes) -> Span:
        """Return which rows of [sequences read, local length], flattened, belong to a layout whose tokens `axes` split.

        `axes` begin with the axes of `batch` and `context`, except those of one rank.
        """
        num_tokens = num_sequences * seq_length
        first, _ = span(num_tokens, self.batch + self.context, self.mesh)
        low, high = span(num_tokens, axes, self.mesh)
        return low - first, high - first


# First positions of the documents of each sequence; None: one document per sequence.
Starts = tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class RingStep:
    """Pairs with the keys and values of the rank `behind` places before this one."""

    behind: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class RingPlan:
    """Attention of one rank of a ring.

    Attributes:
        own: pairs with this rank's own keys and values, as few as possible.
        own_parts: the same pairs in two parts, between which backward computes those of other ranks.
        steps: steps with keys and values of other ranks.
        size: number of ranks.
    """

    own: tuple[Pair, ...]
    own_parts: tuple[tuple[Pair, ...], tuple[Pair, ...]]
    steps: tuple[RingStep, ...]
    size: int
    window: int | None

    @property
    def moves(self) -> tuple[int, ...]:
        """How many ranks keys and values move before each step."""
        places = (0, *(step.behind for step in self.steps))
        return tuple(there - here for here, there in pairwise(places))

    def in_pieces(self, longest: int) -> RingPlan:
        """Return the plan with at most `longest` queries in a pair, for kernels that hold its scores."""

        def pieces(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
            return tuple(piece for pair in pairs for piece in cut(pair, self.window, longest))

        first, second = self.own_parts
        steps = tuple(RingStep(step.behind, pieces(step.pairs)) for step in self.steps)
        return replace(self, own=pieces(self.own), own_parts=(pieces(first), pieces(second)), steps=steps)


class SequenceChunks(NamedTuple):
    """Consecutive sequences whose documents begin at the same positions, and what each rank of a ring holds of them.

    Attributes:
        rows: the sequences; None: all.
    """

    rows: Span | None
    starts: tuple[int, ...]
    chunks: Chunks


def ring_plan(chunks: Chunks, rank: int, starts: Starts = None, window: int | None = None) -> RingPlan:
    """Return the plan of one context rank, given the chunks of all of them, which are the same of all sequences."""
    return plan_of_sequences(sequence_chunks(lambda _: chunks, starts), rank, window)


def sequence_chunks(chunks: Callable[[tuple[int, ...]], Chunks], starts: Starts) -> tuple[SequenceChunks, ...]:
    """Return the chunks of a rank's sequences by where their documents begin."""
    same = [(None, ())] if starts is None else equal_documents(starts)
    return tuple(SequenceChunks(rows, documents, chunks(documents)) for rows, documents in same)


@lru_cache(maxsize=64)
def plan_of_sequences(sequences: tuple[SequenceChunks, ...], rank: int, window: int | None = None) -> RingPlan:
    """Return the plan of one context rank for all its sequences."""
    size = len(sequences[0].chunks)
    held = [[segments(each.chunks[place], each.starts) for each in sequences] for place in range(size)]

    def together(found: list[tuple[Pair, ...]]) -> tuple[Pair, ...]:
        listed = zip(sequences, found, strict=True)
        return tuple(pair._replace(sequences=each.rows) for each, some in listed for pair in some)

    def between(behind: int) -> tuple[Pair, ...]:
        both = zip(held[rank], held[rank - behind], strict=True)
        return together([pairs(queries, keys, window) for queries, keys in both])

    own, parts = together([own_pairs(rows, window) for rows in held[rank]]), between(0)
    needed = {step for place in range(len(sequences)) for step in _steps([each[place] for each in held], window)}
    half = len(parts) // 2
    steps = tuple(RingStep(step, between(step)) for step in sorted(needed))
    return RingPlan(own, (parts[:half], parts[half:]), steps, size, window)


def _steps(held: Sequence[Sequence[Segment]], window: int | None) -> set[int]:
    """Return how many ranks back any rank sees keys of one sequence, given the segments of every rank.

    Segments are taken in the order of positions, each with those before it in its document and window, until all
    steps are found: a document on few ranks has few segments, and one on many soon has every step.
    """
    size, found = len(held), set[int]()
    listed = sorted((segment.first, segment, rank) for rank, mine in enumerate(held) for segment in mine)
    for place, (_, query, reader) in enumerate(listed):
        for _, key, rank in (listed[before] for before in range(place - 1, -1, -1)):
            if len(found) == size - 1 or not seen(query, key, window):
                break
            if rank != reader:
                found.add((reader - rank) % size)
    return found


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

    def of(documents: tuple[int, ...]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        held = order.held(seq_length, documents)
        every = segments(sorted(chunk for chunks in held for chunk in chunks), documents)
        mine = segments(held[rank], documents)
        if not is_alike:
            return (), pairs(mine, every, window)
        first = {segment.first for segment in mine}
        others = [segment for segment in every if segment.first not in first]
        return own_pairs(mine, window), pairs(mine, others, window)

    chunks = joined(order.chunks(seq_length)) if is_alike else ()
    if starts is None:
        return GatheredPairs(*of(()), chunks)
    own, others = list[Pair](), list[Pair]()
    for row, each in enumerate(starts):
        for found, some in zip((own, others), of(each), strict=True):
            found += [pair._replace(sequences=(row, row + 1)) for pair in some]
    return GatheredPairs(tuple(own), tuple(others), chunks)


@lru_cache(maxsize=256)
def scores_computed(
    exchange: str,
    order: TokenOrder,
    seq_length: int,
    backward: bool,
    *,
    window: int | None = None,
    longest: int | None = None,
    starts: Starts = None,
) -> Fraction:
    """Return the scores that a rank computes for each sequence and each of its heads.

    Of sequences whose documents begin at `starts` it is the mean.

    Kernels, which take at most `longest` queries at once, are counted whole where they are causal or masked.  Ranks
    that exchange heads have a share of them.
    """
    shared = order.mesh.size(head_axes(exchange, order.context))
    if window is None and longest is None and starts is None:
        # Of 2 o chunks over o ranks, a rank's own two are one causal pair, but in a ring's backward each alone.
        ranks = order.mesh.size(order.context if exchange == GATHER else ring_axes(exchange, order.context))
        chunks = 2 * ranks + (1 if backward and exchange != GATHER else 2)
        return Fraction(chunks * (seq_length // 2 // ranks) ** 2, shared)
    count = len(starts or ((),))
    if exchange == GATHER:
        found = gathered_pairs(order, seq_length, starts, window)
        return Fraction(num_pair_scores((*found.own, *found.others), window, longest), count)
    plan = exchange_ring(exchange, order, seq_length, starts, window)
    own = plan.own_parts if backward else (plan.own,)
    scores = sum(num_pair_scores(each, window, longest) for each in (*own, *(step.pairs for step in plan.steps)))
    return Fraction(scores, count * shared)
