"""Pairs of query and key rows of whole sequences on one rank: each query row is in one pair, so nothing is merged.

    document                one causal pair
    short documents         one masked pair for several neighbours, since a kernel for a few rows is mostly overhead
    document, window w      a masked pair for each piece of its queries: the piece, and the w - 1 keys before it

A window of w is Hugging Face's `sliding_window`: a query sees itself and the w - 1 positions before it.  Only integers
on the host decide; memory for masks is bounded by the longest piece times (piece + window).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from megatron3d.parallel.attention_pairs import LONGEST, SHORTEST, Kind, Pair, Span, num_pair_scores

# Where attention weights have dropout: the longest sequence whose scores are kept for backward, and the queries of a
# piece of longer ones, whose scores are recomputed.
DROPOUT_ROWS, DROPOUT_PIECE = 1024, 256
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
            found += _pieces(low, high, window, longest)
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
    found, row = [], 0
    for same, rows in groupby(starts):
        last = row + len(list(rows))
        found.append(SequencePairs((row, last), same, pairs_of_sequence(seq_length, same, window, longest)))
        row = last
    return tuple(found)


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


def _pieces(low: int, high: int, window: int | None, longest: int | None) -> Iterator[Pair]:
    """Yield the pairs of one document, a piece of its queries in each."""
    step = min(max(window or LONGEST, SHORTEST), LONGEST, longest or LONGEST)
    for first in range(low, high, step):
        last = min(first + step, high)
        key = low if window is None else max(low, first - window + 1)
        is_causal = key == first and (window is None or last - first <= window)
        kind = Kind.CAUSAL if is_causal else Kind.MASKED
        yield Pair((first, last), (key, last), kind, first - key)
