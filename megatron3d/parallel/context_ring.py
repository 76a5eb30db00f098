"""Steps of ring attention: which pairs of rows a rank multiplies when keys and values have moved s ranks further.

    step 0     own keys and values
    step s     those of context rank r - s, which moved s ranks forward along the ring

A step in which no rank sees anything, as with windows or documents that are short, is left out: keys and values move
past it in one transfer.  So all ranks need the same steps, which depend on the documents that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from megatron3d.parallel.attention_pairs import Pair, Span, own_pairs, pairs, pieces, segments
from megatron3d.parallel.document_chunks import Chunks

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

        def cut(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
            return tuple(piece for pair in pairs for piece in pieces(pair, longest))

        first, second = self.own_parts
        steps = tuple(RingStep(step.behind, cut(step.pairs)) for step in self.steps)
        return replace(self, own=cut(self.own), own_parts=(cut(first), cut(second)), steps=steps)


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
    return tuple(SequenceChunks(rows, documents, chunks(documents)) for rows, documents in _equal_documents(starts))


@lru_cache(maxsize=64)
def plan_of_sequences(sequences: tuple[SequenceChunks, ...], rank: int, window: int | None = None) -> RingPlan:
    """Return the plan of one context rank for all its sequences."""
    size = len(sequences[0].chunks)
    held = [[segments(each.chunks[place], each.starts, window) for each in sequences] for place in range(size)]

    def together(found: list[tuple[Pair, ...]]) -> tuple[Pair, ...]:
        listed = zip(sequences, found, strict=True)
        return tuple(pair._replace(sequences=each.rows) for each, some in listed for pair in some)

    def between(reader: int, behind: int) -> tuple[Pair, ...]:
        both = zip(held[reader], held[reader - behind], strict=True)
        return together([pairs(queries, keys, window) for queries, keys in both])

    own, parts = together([own_pairs(rows, window) for rows in held[rank]]), between(rank, 0)
    needed = [step for step in range(1, size) if any(between(each, step) for each in range(size))]
    half = len(parts) // 2
    steps = tuple(RingStep(step, between(rank, step)) for step in needed)
    return RingPlan(own, (parts[:half], parts[half:]), steps, size, window)


def _equal_documents(starts: Starts) -> list[tuple[Span | None, tuple[int, ...]]]:
    """Return the sequences whose documents begin at the same positions, as ranges, with these positions."""
    if starts is None:
        return [(None, ())]
    found, first = list[tuple[Span | None, tuple[int, ...]]](), 0
    for documents, some in groupby(starts):
        last = first + len(list(some))
        found.append(((first, last), documents))
        first = last
    return found
