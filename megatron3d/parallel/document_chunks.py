"""Positions of a sequence of packed documents, divided among context ranks so that their attention has equal work.

    cut into n k equal chunks  ->  the heaviest chunk first, to the rank with the least work that has fewer than k

A query's work is the keys that it sees, so that chunks late in a long document are heavy and chunks of short documents
are light.  The first of zigzag and of growing k whose busiest rank is near the mean is taken, else the best one: no
sequence is divided worse than by zigzag.  Chunks of equal size dealt by a heap are those of MagiAttention (Sand AI
2025, github.com/SandAI-org/MagiAttention).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron3d.parallel.attention_pairs import Span

# Positions of each context rank, as half-open chunks in ascending order.
Chunks = tuple[tuple[Span, ...], ...]

# Chunks of a rank that are tried, and the work of the busiest rank, over the mean, at which no more are.
COUNTS, NEAR = (2, 4, 8, 16), 1.02
# Chunks of fewer positions are not made of long sequences: attention of few rows is mostly overhead.
SHORTEST_CHUNK = 128


def rank_work(chunks: Sequence[Span], seq_length: int, starts: Sequence[int], window: int | None = None) -> int:
    """Return the pairs of a query and a key that it sees, of the queries of a rank's chunks.

    Args:
        starts: first positions of the documents after the first one, ascending.
        window: number of keys that a query sees, itself included.
    """
    bounds = (0, *starts, seq_length)
    before = (0, *accumulate(_seen(high - low, window) for low, high in pairwise(bounds)))

    def until(position: int) -> int:
        document = min(bisect_right(bounds, position), len(bounds) - 1) - 1
        return before[document] + _seen(position - bounds[document], window)

    return sum(until(high) - until(low) for low, high in chunks)


def imbalance(chunks: Chunks, starts: Sequence[int], window: int | None = None) -> float:
    """Return the work of the busiest rank over the mean."""
    work = [rank_work(each, _length(chunks), starts, window) for each in chunks]
    return max(work) * len(work) / sum(work)


@lru_cache(maxsize=1024)
def balanced_chunks(zigzag: Chunks, starts: tuple[int, ...], window: int | None = None) -> Chunks:
    """Return the chunks of each rank by the work of the documents, or `zigzag` where these are no better.

    Every rank holds as many positions as in `zigzag`; neighbouring chunks of a rank are joined.
    """
    length, best, least = _length(zigzag), zigzag, imbalance(zigzag, starts, window)
    per_rank = length // len(zigzag)
    for count in COUNTS:
        is_long = per_rank >= count * SHORTEST_CHUNK or count <= COUNTS[1]
        if least <= NEAR or per_rank % count or not is_long:
            continue
        found = _dealt(length, len(zigzag), count, starts, window)
        if (worst := imbalance(found, starts, window)) < least:
            best, least = found, worst
    return best


def _dealt(length: int, num_ranks: int, count: int, starts: tuple[int, ...], window: int | None) -> Chunks:
    """Return `count` chunks of equal size for each rank."""
    size = length // (num_ranks * count)
    chunks = [(low, low + size) for low in range(0, length, size)]
    work = {chunk: rank_work((chunk,), length, starts, window) for chunk in chunks}
    held: list[list[Span]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for chunk in sorted(chunks, key=lambda chunk: (-work[chunk], chunk)):
        rank = min((rank for rank in range(num_ranks) if len(held[rank]) < count), key=load.__getitem__)
        held[rank].append(chunk)
        load[rank] += work[chunk]
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
