"""Attention as values: the heads that a rank holds, and the pairs of query and key rows that it multiplies.

Query heads are sharded evenly.  With grouped queries (GQA, Ainslie et al. 2023, arXiv:2305.13245) the features of all
key/value heads are sharded evenly: where there are fewer key/value heads than ranks, a shard ends within a head, and
keys and values are all-gathered over some axes.  Narrow features of the residual stream are made whole: the rotary key
that all heads share, and in generation the latents of keys and values (DeepSeek-AI 2024, arXiv:2405.04434, section
2.1).  Attention needs all of them for its inner tokens:

    forward     all-gather as X of an `expand` matmul; all-gather features over k; keep own rows where k splits tokens
    backward    all-gather the rows again; reduce-scatter over k where it splits heads, else keep the own features;
                reduce as dX of an `expand` matmul

So the gradient is summed over exactly the axes that split heads.

A rank holds chunks of the positions of a sequence, one after the other.  Cut where documents begin, they are segments
of one document each, and a query segment sees of a key segment all, the keys up to itself, none, or, at the edge of a
sliding window, a band:

    query >= key, same document         whole where all keys come before all queries, causal where both are one segment
    query - key < window                masked where only some of the pairs are near enough

Neighbouring pairs are joined: without documents and windows, zigzag chunks (arXiv:2311.09431) make one pair for each
context rank.  Of whole sequences on one rank, each query row is in one pair, and nothing is merged:

    document                one causal pair
    short documents         one masked pair for several neighbours, since a kernel for a few rows is mostly overhead
    document, window w      a masked pair for each piece of its queries: the piece, and the w - 1 keys before it

Only integers on the host decide, so that no rank waits for its device.  A window of w is Hugging Face's
`sliding_window`: a query sees itself and the w - 1 positions before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, flows, moves
from megatron3d.parallel.mesh import Axes, Mesh

Span = tuple[int, int]


class Placed(Protocol):
    """Anything with a mesh, such as a communicator."""

    @property
    def mesh(self) -> Mesh:
        """Mesh of ranks, seen from this one."""
        ...


@dataclass(frozen=True)
class HeadSplit:
    """Heads of one rank; `axes` shard the query heads, and the features of all key/value heads, evenly."""

    num_heads: int
    num_groups: int
    size: int
    axes: Axes
    comm: Placed

    @cached_property
    def query_span(self) -> tuple[int, int]:
        """Query heads of this rank, a half-open range."""
        return span(self.num_heads, self.axes, self.comm.mesh)

    def _groups(self, rank: int) -> tuple[int, int]:
        low, high = span(self.num_heads, self.axes, self.comm.mesh.at(rank))
        return self._group(low), self._group(high - 1) + 1

    def _group(self, head: int) -> int:
        return head * self.num_groups // self.num_heads

    @cached_property
    def group_span(self) -> tuple[int, int]:
        """Key/value heads that this rank's query heads attend with, a half-open range."""
        return self._groups(self.comm.mesh.rank)

    @cached_property
    def gather_axes(self) -> Axes:
        """Fewest trailing axes over which keys and values must be all-gathered, the same on every rank."""
        mesh, width = self.comm.mesh, self.num_groups * self.size
        for start in range(len(self.axes), -1, -1):
            kept, gathered = self.axes[:start], self.axes[start:]
            if all(self._holds_groups(rank, span(width, kept, mesh.at(rank))) for rank in mesh.ranks(self.axes)):
                return gathered
        raise AssertionError("keys and values gathered over every axis are whole")

    def _holds_groups(self, rank: int, features: tuple[int, int]) -> bool:
        """Return whether a range of key features contains all groups that a rank's queries need."""
        first, last = self._groups(rank)
        return features[0] <= first * self.size and last * self.size <= features[1]

    @cached_property
    def group_of_query(self) -> list[int]:
        """For each query head of this rank, the index of its key/value head in `group_span`."""
        return [self._group(head) - self.group_span[0] for head in range(*self.query_span)]

    @cached_property
    def are_even(self) -> bool:
        """Whether each key/value head of this rank serves equally many consecutive query heads."""
        num_heads, num_groups = len(self.group_of_query), self.group_span[1] - self.group_span[0]
        ratio = max(num_heads // num_groups, 1)
        return self.group_of_query == [head // ratio for head in range(num_heads)] and num_heads % num_groups == 0


def row_axes(plan: MatmulPlan) -> Axes:
    """Return the axes of k that split the tokens of the inner stream."""
    return tuple(axis for axis, dim in plan.y.items() if dim == "M")


def latent_axes(plan: MatmulPlan) -> tuple[Axes, ...]:
    """Return the sets of axes that these collectives use besides those of the matmul."""
    return (plan.k, row_axes(plan), *(step.axes for step in moves(plan.y) if step.dim == "N"))


def latent_traffic(
    plan: MatmulPlan, mesh: Mesh, tokens: int, size: int, itemsize: int, backward: bool
) -> list[Traffic]:
    """Return the collectives that make `size` features of all `tokens` whole, or those of their gradient."""
    sent, plan = flows(plan, mesh, tokens, 1, size, itemsize), plan.on(mesh)
    whole_bytes = tokens / mesh.size(plan.m) * size * itemsize

    def part(collective: str, axes: Axes) -> list[Traffic]:
        ranks = mesh.size(axes)
        return [Traffic(collective, axes, whole_bytes * (ranks - 1) / ranks)] if axes else []

    if not backward:
        return [*sent.gather_x, *part("all_gather", plan.k)]
    calls = part("all_gather", row_axes(plan))
    for step in moves(plan.y):
        calls += part("reduce_scatter", step.axes) if step.dim == "N" else []
        whole_bytes /= mesh.size(step.axes)
    return [*calls, *sent.reduce_dx]


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


def segments(chunks: Iterable[Span], starts: Sequence[int] = ()) -> tuple[Segment, ...]:
    """Return the segments of a rank's chunks of positions, in the order of its rows: one per chunk and document.

    Args:
        chunks: half-open ranges of positions, ascending.
        starts: first positions of the documents after the first one, ascending.
    """
    found, row = list[Segment](), 0
    for low, high in chunks:
        document, end = bisect_right(starts, low), bisect_left(starts, high)
        for number, (begin, last) in enumerate(pairwise((low, *starts[document:end], high)), document):
            found.append(Segment((row, row + last - begin), begin, number))
            row += last - begin
    return tuple(found)


def seen(query: Segment, key: Segment, window: int | None) -> Pair | None:
    """Return the rows of a query segment and of one that is the same or disjoint that see and are seen; None: none."""
    distance, (low, high), first = query.first - key.first, query.rows, key.rows[0]
    if query.document != key.document or distance < 0:
        return None
    if distance == 0:
        kind = Kind.CAUSAL if window is None or query.length <= window else Kind.MASKED
        return Pair(query.rows, key.rows, kind)
    if window is None:
        return Pair(query.rows, key.rows, Kind.WHOLE, distance)
    high = min(high, low + key.length - 1 - distance + window)
    if high <= low:
        return None
    hidden = max(0, distance - window + 1)
    distance -= hidden
    kind = Kind.WHOLE if distance + high - low <= window else Kind.MASKED
    return Pair((low, high), (first + hidden, key.rows[1]), kind, distance)


def pairs(queries: Sequence[Segment], keys: Sequence[Segment], window: int | None = None) -> tuple[Pair, ...]:
    """Return the pairs of two ranks' segments in which queries see keys.

    Pairs of a segment with itself come last, so that a list of a rank's own pairs can be divided.
    """
    of_document: dict[int, list[Segment]] = {}
    for key in keys:
        of_document.setdefault(key.document, []).append(key)
    found = [
        pair for query in queries for key in of_document.get(query.document, ()) if (pair := seen(query, key, window))
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


def num_pair_scores(found: Iterable[Pair], window: int | None = None, longest: int | None = None) -> int:
    """Return the scores that kernels compute of pairs; those of causal and of masked pairs count all, as in MFU.

    Pairs of some sequences of a batch count once for each of them.

    Args:
        longest: most queries that a kernel takes at once; causal pairs of more are computed in pieces.
    """
    return sum(
        (piece.queries[1] - piece.queries[0])
        * (piece.keys[1] - piece.keys[0])
        * (pair.sequences[1] - pair.sequences[0] if pair.sequences else 1)
        for pair in found
        for piece in cut(pair, window, longest)
    )


def cut(pair: Pair, window: int | None = None, longest: int | None = None) -> Iterator[Pair]:
    """Yield a pair in pieces of its queries with the keys that these may see, for kernels that need a mask or scores.

    Args:
        window: number of keys that a query sees, itself included.
        longest: most queries of a piece; None: a masked pair is cut by its window, and others are not cut.
    """
    (low, high), (first, last), whole = pair.queries, pair.keys, pair.kind is Kind.WHOLE
    step = min(longest or LONGEST, LONGEST)
    if pair.kind is Kind.MASKED:
        step = min(step, max(window or LONGEST, SHORTEST))
    elif longest is None or high - low <= longest:
        yield pair
        return
    for begin in range(low, high, step):
        end, distance = min(begin + step, high), pair.distance + begin - low
        if whole:
            yield pair._replace(queries=(begin, end), distance=distance)
            continue
        hidden = 0 if window is None else max(0, distance - window + 1)
        keys = (first + hidden, min(last, first + distance + end - begin))
        distance -= hidden
        yield Pair(
            (begin, end), keys, _kind(end - begin, keys[1] - keys[0], distance, window), distance, pair.sequences
        )


def _kind(num_queries: int, num_keys: int, distance: int, window: int | None) -> Kind:
    """Return what consecutive queries see of consecutive keys of a document."""
    if window is None or distance + num_queries <= window:
        if distance == 0 and num_keys == num_queries:
            return Kind.CAUSAL
        if num_keys - 1 <= distance:
            return Kind.WHOLE
    return Kind.MASKED


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


# Where attention weights have dropout: the longest sequence whose scores are kept for backward, and the queries of a
# piece of longer ones, whose scores are recomputed.
DROPOUT_ROWS, DROPOUT_PIECE = 1024, 256
# Queries whose largest logit is searched for at once.
LOGITS_PIECE = 128


def logit_pieces(positions: Sequence[int], window: int | None) -> Iterator[tuple[Span, range]]:
    """Yield the rows of queries at these ascending positions whose largest logit is searched at once, and the keys."""
    for low in range(0, len(positions), LOGITS_PIECE):
        high = min(low + LOGITS_PIECE, len(positions))
        first = 0 if window is None else max(0, positions[low] - window + 1)
        yield (low, high), range(first, positions[high - 1] + 1)


Starts = tuple[int, ...]
"""First positions of the documents of a sequence after its first document, ascending."""


class SequencePairs(NamedTuple):
    """Pairs of the consecutive sequences `rows`, all of which have the same documents."""

    rows: Span
    starts: Starts
    pairs: tuple[Pair, ...]


@lru_cache(maxsize=256)
def pairs_of_sequence(
    seq_length: int, starts: Starts = (), window: int | None = None, longest: int | None = None
) -> tuple[Pair, ...]:
    """Return the pairs of a sequence in the order of its positions; without documents and window, one causal pair.

    Args:
        window: number of keys that a query sees, itself included.
        longest: most queries of a pair, for kernels that keep its scores.
    """
    spans = list(pairwise((0, *starts, seq_length)))
    found: list[Pair] = []
    for group in _neighbours(spans):
        low, high = group[0][0], group[-1][1]
        fits = window is None or high - low <= window
        if len(group) > 1:
            found.append(Pair((low, high), (low, high), Kind.MASKED))
        elif fits and (longest is None or high - low <= longest):
            found.append(Pair((low, high), (low, high), Kind.CAUSAL))
        else:
            found += cut(Pair((low, high), (low, high), Kind.MASKED), window, longest)
    return tuple(found)


def sequence_pairs(
    num_sequences: int,
    seq_length: int,
    starts: Sequence[Starts] | None = None,
    window: int | None = None,
    longest: int | None = None,
) -> tuple[SequencePairs, ...]:
    """Return the pairs of a rank's sequences; neighbours with the same documents are computed together."""
    if starts is None:
        return (SequencePairs((0, num_sequences), (), pairs_of_sequence(seq_length, (), window, longest)),)
    assert len(starts) == num_sequences, f"documents of {len(starts)} sequences, not of {num_sequences}"
    return tuple(
        SequencePairs(rows, same, pairs_of_sequence(seq_length, same, window, longest))
        for rows, same in equal_documents(starts)
    )


def equal_documents(starts: Sequence[Starts]) -> Iterator[tuple[Span, Starts]]:
    """Yield the ranges of sequences whose documents begin at the same positions, with these positions."""
    row = 0
    for same, rows in groupby(starts):
        first, row = row, row + len(list(rows))
        yield (first, row), same


def num_scores(seq_length: int, window: int | None, longest: int | None = None, starts: Starts = ()) -> int:
    """Return the scores that the pairs of a sequence compute; those of a causal pair count all, as in MFU."""
    return num_pair_scores(pairs_of_sequence(seq_length, starts, window, longest))


def _neighbours(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield documents in order, several at once as long as they have at most `SHORTEST` positions together."""
    group: list[Span] = []
    for low, high in spans:
        if group and high - group[0][0] > SHORTEST:
            yield group
            group = []
        group.append((low, high))
    yield group
