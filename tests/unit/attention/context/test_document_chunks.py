"""Fact: chunks by the work of documents hold every position once, as many on each rank, and balance attention better
than zigzag."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.attention.context.plan import (
    COUNTS,
    TokenOrder,
    balanced_chunks,
    exchange_ring,
    gathered_pairs,
    held_chunks,
    imbalance,
    rank_work,
    work_before,
)
from megatron3d.parallel.mesh import Mesh


def order_of(num_ranks: int, rank: int = 0) -> TokenOrder:
    return TokenOrder((), ("context",), Mesh((("context", num_ranks),)).at(rank), by_documents=True)


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """Return context ranks, length and starts of documents."""
    num_ranks, chunk = draw(st.integers(2, 5)), draw(st.integers(1, 24))
    length = 2 * num_ranks * chunk
    return num_ranks, length, tuple(sorted(draw(st.sets(st.integers(1, length - 1), max_size=9))))


@given(case=packed(), window=st.none() | st.integers(1, 30))
def test_every_position_is_held_once_and_no_sequence_is_worse(
    case: tuple[int, int, tuple[int, ...]], window: int | None
) -> None:
    num_ranks, length, starts = case
    zigzag = order_of(num_ranks).held(length)
    found = balanced_chunks(zigzag, starts, window)
    positions = [[at for low, high in chunks for at in range(low, high)] for chunks in found]
    assert sorted(at for mine in positions for at in mine) == list(range(length))
    assert {len(mine) for mine in positions} == {length // num_ranks}
    assert all(mine == sorted(mine) for mine in positions)
    until = work_before(length, starts, window)
    assert imbalance(found, until) <= imbalance(zigzag, until)


@given(case=packed(), window=st.none() | st.integers(1, 30))
def test_work_is_the_number_of_keys_that_queries_see(
    case: tuple[int, int, tuple[int, ...]], window: int | None
) -> None:
    num_ranks, length, starts = case
    first = {at: low for low, high in pairwise((0, *starts, length)) for at in range(low, high)}
    for chunks in order_of(num_ranks).held(length):
        seen = [min(at - first[at] + 1, window or length) for low, high in chunks for at in range(low, high)]
        assert rank_work(chunks, work_before(length, starts, window)) == sum(seen)


def web_documents(length: int, seed: int) -> tuple[int, ...]:
    """Return where documents begin whose lengths are log-normal around 600 tokens."""
    draw, starts, place = random.Random(seed), list[int](), 0
    while (place := place + max(20, int(draw.lognormvariate(6.4, 1.2)))) < length:
        starts.append(place)
    return tuple(starts)


@pytest.mark.parametrize(("length", "num_ranks", "least"), [(8192, 4, 1.3), (32768, 8, 1.6), (131072, 16, 2.0)])
def test_packed_texts_are_within_a_few_per_cent_of_equal_work(length: int, num_ranks: int, least: float) -> None:
    """Zigzag leaves the busiest rank twice the mean and more."""
    order, every = order_of(num_ranks), [web_documents(length, seed) for seed in range(6)]
    zigzag = [imbalance(order.held(length), work_before(length, starts)) for starts in every]
    found = [imbalance(order.held(length, starts), work_before(length, starts)) for starts in every]
    assert sum(zigzag) / len(every) > least
    assert max(found) < 1.05


def test_the_pairs_of_ranks_have_the_work_that_is_balanced() -> None:
    """Rings and gathered keys multiply what the closed form counts, and causal pairs twice that less the diagonal."""
    length, starts = 2048, web_documents(2048, 3)
    held = order_of(4).held(length, starts)
    assert held != order_of(4).held(length)
    for rank in range(4):
        order, work = order_of(4, rank), rank_work(held[rank], work_before(length, starts))
        plan = exchange_ring("p2p", order, length, (starts,))
        seen = 0
        for pair in (*plan.own, *(pair for step in plan.steps for pair in step.pairs)):
            rows, keys = pair.queries[1] - pair.queries[0], pair.keys[1] - pair.keys[0]
            seen += rows * keys if pair.kind.value == "whole" else rows * (rows + 1) // 2
        assert seen == work
        gathered = gathered_pairs(order, length, (starts,))
        assert sum(p.queries[1] - p.queries[0] for p in gathered.others if p.kind.value == "causal") == length // 4


def test_chunks_are_few_and_joined() -> None:
    length, starts = 32768, web_documents(32768, 1)
    held = order_of(8).held(length, starts)
    assert max(map(len, held)) <= COUNTS[-1]
    assert all(low > before for chunks in held for (_, before), (low, _) in pairwise(chunks))


def test_ranks_that_exchange_heads_hold_the_chunks_of_their_ring_rank_together() -> None:
    starts = (3, 11, 12, 30)
    ring, every = held_chunks(order_of(4), 32, 2, starts), order_of(4).held(32, starts)
    for place, chunks in enumerate(ring):
        together = sorted(at for low, high in chunks for at in range(low, high))
        inner = every[2 * place : 2 * place + 2]
        assert together == sorted(at for held in inner for low, high in held for at in range(low, high))
