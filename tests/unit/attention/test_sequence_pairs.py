"""Fact: the pairs of a sequence hold each query once, and exactly the keys that it sees, up to their masks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron3d.attention.plan import (
    LONGEST,
    SHORTEST,
    Kind,
    Starts,
    num_scores,
    pairs_of_sequence,
    sequence_pairs,
)

LENGTHS = st.integers(1, 3 * LONGEST)


@st.composite
def documents(draw: st.DrawFn) -> tuple[int, Starts]:
    """Return a sequence length and where its later documents begin."""
    length = draw(LENGTHS)
    return length, tuple(sorted(draw(st.sets(st.integers(1, length), max_size=6)) - {length}))


@given(row=documents(), window=st.none() | st.integers(1, 2 * LONGEST), longest=st.none() | st.just(SHORTEST))
def test_each_query_is_in_one_pair_with_the_keys_that_it_sees(
    row: tuple[int, Starts], window: int | None, longest: int | None
) -> None:
    length, starts = row
    begins = (0, *starts)
    pairs = pairs_of_sequence(length, starts, window, longest)
    assert [at for pair in pairs for at in range(*pair.queries)] == list(range(length))
    for pair in pairs:
        (low, high), (first, last) = pair.queries, pair.keys
        begin = max(start for start in begins if start <= low)
        assert first == max(begin, 0 if window is None else low - window + 1) or high - first <= SHORTEST
        assert last == high and first <= low
        assert longest is None or high - low <= longest
        if pair.kind is Kind.CAUSAL:
            assert (low, high) == (first, last) and not any(low < start < high for start in starts)
            assert window is None or high - low <= window


def test_neighbouring_short_documents_are_one_pair() -> None:
    starts = tuple(range(1, 1000))
    assert len(pairs_of_sequence(1000, starts)) == -(-1000 // SHORTEST)
    assert pairs_of_sequence(600, (100, 250, 300))[0].queries == (0, 250)


def test_sequences_with_the_same_documents_are_computed_together() -> None:
    found = sequence_pairs(5, 9, ((), (), (4,), (), ()))
    assert [(same.rows, same.starts) for same in found] == [((0, 2), ()), ((2, 3), (4,)), ((3, 5), ())]
    assert sequence_pairs(5, 9)[0].rows == (0, 5)


def test_scores_of_a_window_grow_linearly() -> None:
    assert num_scores(4096, None) == 4096**2 and num_scores(4096, 4096) == 4096**2
    scores = [num_scores(length, 512) for length in (8192, 16384, 32768)]
    assert scores[1] - scores[0] == 8192 * (512 + 511) and scores[2] - scores[1] == 2 * (scores[1] - scores[0])
