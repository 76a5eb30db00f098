"""Fact: the pairs of any chunks, documents and window allow exactly what the dense mask allows, each entry once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.attention.context.plan import (
    CONTEXT_EXCHANGES,
    GATHER,
    Chunks,
    TokenOrder,
    exchange_ring,
    gathered_pairs,
    ring_plan,
)
from megatron3d.attention.plan import Kind, Pair, cut, pairs, segments
from megatron3d.parallel.mesh import Mesh

LENGTH = 24
Seen = list[tuple[int, int]]


def split(kind: str, size: int) -> Chunks:
    """Return the chunks of every rank: zigzag, contiguous, or of uneven lengths."""
    if kind == "zigzag":
        step = LENGTH // (2 * size)
        return tuple(tuple((c * step, (c + 1) * step) for c in (r, 2 * size - 1 - r)) for r in range(size))
    step = LENGTH // size
    if kind == "contiguous":
        return tuple(((r * step, (r + 1) * step),) for r in range(size))
    if kind == "tiles":
        return (tuple((first, first + 4) for first in range(0, LENGTH, 4)),)
    return (((0, 3), (9, 10)), ((3, 9), (10, LENGTH)))


LAYOUTS = st.sampled_from(
    [split(kind, size) for kind in ("zigzag", "contiguous") for size in (1, 2, 4)]
    + [split("uneven", 2), split("tiles", 1)]
)
STARTS = st.sets(st.integers(0, LENGTH - 1)).map(lambda found: tuple(sorted({0, *found})))
WINDOWS = st.one_of(st.none(), st.integers(1, LENGTH + 1))


def positions(chunks: tuple[tuple[int, int], ...]) -> list[int]:
    return [place for low, high in chunks for place in range(low, high)]


def seen_by(pair: Pair, queries: list[int], keys: list[int], window: int | None) -> Seen:
    """Return query and key positions that a pair's kernel multiplies."""
    found = []
    for i, query in enumerate(queries[slice(*pair.queries)]):
        for j, key in enumerate(keys[slice(*pair.keys)]):
            near = window is not None and 0 <= pair.distance + i - j < window
            if {Kind.WHOLE: True, Kind.CAUSAL: j <= i, Kind.MASKED: near}[pair.kind]:
                found.append((query, key))
    return found


def dense(queries: list[int], keys: list[int], starts: tuple[int, ...], window: int | None) -> Seen:
    def document(place: int) -> int:
        return sum(start <= place for start in starts)

    return sorted(
        (query, key)
        for query in queries
        for key in keys
        if 0 <= query - key < (window or LENGTH) and document(query) == document(key)
    )


@given(LAYOUTS, STARTS, WINDOWS)
def test_pairs_are_the_dense_mask(layout: Chunks, starts: tuple[int, ...], window: int | None) -> None:
    held = [positions(chunks) for chunks in layout]
    for rank, queries in enumerate(held):
        plan = ring_plan(layout, rank, (starts,), window)
        steps = {0: plan.own} | {step.behind: step.pairs for step in plan.steps}
        assert sum(plan.moves) == (plan.steps[-1].behind if plan.steps else 0)
        for behind in range(len(layout)):
            keys = held[rank - behind]
            found = [each for pair in steps.get(behind, ()) for each in seen_by(pair, queries, keys, window)]
            assert sorted(found) == dense(queries, keys, starts, window)
        parts = [each for part in plan.own_parts for pair in part for each in seen_by(pair, queries, queries, window)]
        assert sorted(parts) == dense(queries, queries, starts, window)


@given(LAYOUTS, STARTS, WINDOWS)
def test_every_rank_takes_the_same_steps(layout: Chunks, starts: tuple[int, ...], window: int | None) -> None:
    plans = [ring_plan(layout, rank, (starts,), window) for rank in range(len(layout))]
    assert len({tuple(step.behind for step in plan.steps) for plan in plans}) == 1


@given(LAYOUTS, STARTS, WINDOWS, st.none() | st.integers(1, 9))
def test_pieces_of_pairs_are_the_pairs(
    layout: Chunks, starts: tuple[int, ...], window: int | None, longest: int | None
) -> None:
    for rank, queries in enumerate(map(positions, layout)):
        for step in ring_plan(layout, rank, (starts,), window).steps:
            keys = positions(layout[rank - step.behind])
            for pair in step.pairs:
                found = [each for piece in cut(pair, window, longest) for each in seen_by(piece, queries, keys, window)]
                assert sorted(found) == sorted(seen_by(pair, queries, keys, window))
                assert longest is None or all(
                    p.queries[1] - p.queries[0] <= longest for p in cut(pair, window, longest)
                )


def test_long_pairs_are_cut_only_for_windows() -> None:
    whole, masked = (Pair((0, 5000), (0, 5000), kind) for kind in (Kind.CAUSAL, Kind.MASKED))
    assert list(cut(whole)) == [whole]
    for window, most in ((64, 256), (4096, 1024)):
        assert max(pair.queries[1] - pair.queries[0] for pair in cut(masked, window)) == most
        assert max(pair.keys[1] - pair.keys[0] for pair in cut(masked, window)) <= most + window - 1


@pytest.mark.parametrize("exchange", CONTEXT_EXCHANGES)
def test_a_window_makes_a_few_pairs_of_any_length(exchange: str) -> None:
    """At 131,072 positions, and at eight times as many: a pair for each chunk, and one for the chunk before it."""
    for length in (2**17, 2**20):
        order = TokenOrder((), ("context", "context_inner"), Mesh((("context", 8), ("context_inner", 2))).at(3))
        if exchange == GATHER:
            found = gathered_pairs(order, length, None, 1024)
            counts = [len(found.own), len(found.others)]
        else:
            plan = exchange_ring(exchange, order, length, None, 1024)
            counts = [len(plan.own), *(len(step.pairs) for step in plan.steps)]
        assert sum(counts) <= 5, counts


def test_zigzag_makes_one_pair_for_each_rank() -> None:
    """A rank attends causally to its own chunks, and to those of each other rank by one whole pair of equal work."""
    layout = split("zigzag", 4)
    for rank in range(4):
        plan = ring_plan(layout, rank)
        assert [pair.kind for pair in plan.own] == [Kind.CAUSAL]
        assert [[pair.kind for pair in step.pairs] for step in plan.steps] == [[Kind.WHOLE]] * 3
        work = [(p.queries[1] - p.queries[0]) * (p.keys[1] - p.keys[0]) for step in plan.steps for p in step.pairs]
        assert set(work) == {2 * 3 * 3}


def test_a_short_window_leaves_out_steps() -> None:
    """Only the neighbours on both sides of a rank with zigzag chunks have keys of a short window."""
    assert [step.behind for step in ring_plan(split("zigzag", 4), 1, None, 2).steps] == [1, 3]
    assert ring_plan(split("zigzag", 4), 1, None, 2).moves == (1, 2)
    assert [step.behind for step in ring_plan(split("contiguous", 4), 1, None, 2).steps] == [1]


def test_documents_inside_chunks_need_no_step() -> None:
    assert ring_plan(split("zigzag", 4), 2, (tuple(range(0, LENGTH, 3)),)).steps == ()


def test_sequences_of_equal_documents_share_pairs() -> None:
    plan = ring_plan(split("contiguous", 1), 0, ((0,), (0,), (0, 7)))
    assert [(pair.sequences, pair.queries) for pair in plan.own] == [
        ((0, 2), (0, 24)),
        ((2, 3), (0, 7)),
        ((2, 3), (7, 24)),
    ]


def test_pairs_of_other_documents_are_left_out() -> None:
    first, second = segments(((0, 4), (8, 12)), (8,)), segments(((4, 8),), (8,))
    assert pairs(first, second) == ()
    assert [pair.kind for pair in pairs(second, first)] == [Kind.WHOLE]
