"""Pairs of query and key rows that attention multiplies: whole, causal, or masked; empty pairs are left out.

A rank holds chunks of the positions of a sequence, one after the other.  Cut where documents begin, they are segments
of one document each, and a query segment sees of a key segment all, the keys up to itself, none, or, at the edge of a
sliding window, a band:

    query >= key, same document         whole where all keys come before all queries, causal where both are one segment
    query - key < window                masked where only some of the pairs are near enough

Only integers on the host decide this, so that no rank waits for its device.  Neighbouring pairs are joined: without
documents and windows, zigzag chunks (arXiv:2311.09431) make one pair for each context rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

Span = tuple[int, int]

# Shortest and longest segment where there is a window: longer ones make larger masks, shorter ones more kernels.
SHORTEST, LONGEST = 256, 1024


class Kind(Enum):
    """What the queries of a pair see of its keys."""

    WHOLE = "whole"
    CAUSAL = "causal"
    MASKED = "masked"


class Segment(NamedTuple):
    """Consecutive positions of one document: their rows on the rank that holds them, and the first position."""

    rows: Span
    first: int
    document: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.rows[1] - self.rows[0]


class Pair(NamedTuple):
    """Rows of queries and of keys, half-open, and what the queries see.

    Attributes:
        distance: of the first query from the first key, in positions; a masked pair needs it.
        sequences: sequences of the batch that have this pair; None: all.
    """

    queries: Span
    keys: Span
    kind: Kind
    distance: int = 0
    sequences: Span | None = None


def segments(chunks: Iterable[Span], starts: Sequence[int] = (), window: int | None = None) -> tuple[Segment, ...]:
    """Return the segments of a rank's chunks of positions, in the order of its rows.

    Args:
        chunks: half-open ranges of positions, ascending.
        starts: first positions of the documents after the first one, ascending.
        window: number of keys that a query sees, itself included.
    """
    longest = None if window is None else min(max(window, SHORTEST), LONGEST)
    found, row, document = [], 0, 0
    for low, high in chunks:
        while document < len(starts) and starts[document] <= low:
            document += 1
        cuts = [low, *(start for start in starts[document:] if start < high), high]
        for begin, end in pairwise(cuts):
            number = document + cuts.index(begin)
            for first in range(begin, end, longest or end - begin):
                last = min(first + (longest or end - begin), end)
                found.append(Segment((row, row + last - first), first, number))
                row += last - first
    return tuple(found)


def classify(query: Segment, key: Segment, window: int | None) -> Kind | None:
    """Return what a query segment sees of a key segment that is the same one or disjoint; None: nothing."""
    distance = query.first - key.first
    if query.document != key.document or distance < 0:
        return None
    if window is None or distance + query.length <= window:
        return Kind.WHOLE if distance else Kind.CAUSAL
    return Kind.MASKED if distance - key.length + 1 < window else None


def pairs(queries: Sequence[Segment], keys: Sequence[Segment], window: int | None = None) -> tuple[Pair, ...]:
    """Return the pairs of two ranks' segments in which queries see keys.

    Pairs of a segment with itself come last, so that a list of a rank's own pairs can be divided.
    """
    of_document: dict[int, list[Segment]] = {}
    for key in keys:
        of_document.setdefault(key.document, []).append(key)
    found = [
        Pair(query.rows, key.rows, kind, query.first - key.first)
        for query in queries
        for key in of_document.get(query.document, ())
        if (kind := classify(query, key, window))
    ]
    whole = [pair for pair in found if pair.kind is Kind.WHOLE]
    others = [pair for pair in found if pair.kind is not Kind.WHOLE]
    return (*_joined(whole), *sorted(others, key=lambda pair: pair.distance == 0))


def own_pairs(rows: Sequence[Segment], window: int | None = None) -> tuple[Pair, ...]:
    """Return the pairs of a rank's segments with themselves, one causal pair for each document without a window.

    Rows ascend in position, so that within a document each row sees all rows up to itself.
    """
    if window is not None:
        return pairs(rows, rows, window)
    spans: list[list[int]] = []
    for before, segment in pairwise((None, *rows)):
        assert segment is not None, "only the first has nothing before it"
        if before is None or before.document != segment.document:
            spans.append(list(segment.rows))
        spans[-1][1] = segment.rows[1]
    return tuple(Pair((low, high), (low, high), Kind.CAUSAL) for low, high in spans)


def num_pair_scores(found: Iterable[Pair], longest: int | None = None) -> int:
    """Return the scores that kernels compute of pairs; those of causal and of masked pairs count all, as in MFU.

    Pairs of some sequences of a batch count once for each of them.

    Args:
        longest: most queries that a kernel takes at once; causal pairs of more are computed in pieces.
    """
    return sum(
        _num_scores(pair, longest) * (pair.sequences[1] - pair.sequences[0] if pair.sequences else 1) for pair in found
    )


def _num_scores(pair: Pair, longest: int | None) -> int:
    rows, keys = pair.queries[1] - pair.queries[0], pair.keys[1] - pair.keys[0]
    if longest is None or pair.kind is not Kind.CAUSAL:
        return rows * keys
    return sum(min(longest, rows - low) * min(low + longest, rows) for low in range(0, rows, longest))


def pieces(pair: Pair, longest: int) -> Iterator[Pair]:
    """Yield a pair in pieces of at most `longest` queries; those of a causal pair are masked."""
    low, high = pair.queries
    kind = Kind.MASKED if pair.kind is Kind.CAUSAL and high - low > longest else pair.kind
    for first in range(low, high, longest):
        last = min(first + longest, high)
        keys = (pair.keys[0], pair.keys[0] + last - low) if pair.kind is Kind.CAUSAL else pair.keys
        yield pair._replace(queries=(first, last), keys=keys, kind=kind, distance=pair.distance + first - low)


def _joined(whole: Iterable[Pair]) -> Iterator[Pair]:
    """Yield whole pairs, joined where keys, and then where queries follow one another."""
    by_keys: list[Pair] = []
    for pair in sorted(whole):
        last = by_keys[-1] if by_keys else None
        if last and last.queries == pair.queries and last.keys[1] == pair.keys[0]:
            by_keys[-1] = last._replace(keys=(last.keys[0], pair.keys[1]))
        else:
            by_keys.append(pair)
    joined: dict[Span, Pair] = {}
    for pair in by_keys:
        last = joined.get(pair.keys)
        if last and last.queries[1] == pair.queries[0]:
            joined[pair.keys] = last._replace(queries=(last.queries[0], pair.queries[1]))
            continue
        if last:
            yield last
        joined[pair.keys] = pair
    yield from joined.values()
