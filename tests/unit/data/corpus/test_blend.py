"""Fact: after any number of samples every source of a blend is within one sample of its share, and none is left out."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.data.corpus.plan import MAX_TOTAL, Blend, Paths, parse_paths, whole_parts
from megatron3d.errors import UserError

PARTS = st.lists(st.integers(1, 60), min_size=1, max_size=8).map(tuple)


@given(parts=PARTS)
def test_every_prefix_is_within_one_sample(parts: tuple[int, ...]) -> None:
    total, bound = sum(parts), 1 - 1 / (2 * len(parts) - 2) if len(parts) > 1 else 0
    sources, _ = Blend(parts).locate(np.arange(2 * total))
    counts = np.cumsum(sources[:, None] == np.arange(len(parts)), axis=0)
    shares = np.arange(1, 2 * total + 1)[:, None] * np.array(parts) / total
    assert np.abs(counts - shares).max() <= bound + 1e-9
    assert counts[total - 1].tolist() == list(parts)


@given(parts=PARTS, start=st.integers(0, 10**15))
def test_every_sample_of_a_source_occurs_once_and_in_order(parts: tuple[int, ...], start: int) -> None:
    blend = Blend(parts)
    sources, positions = blend.locate(start + np.arange(300))
    before, after = blend.counts(start), blend.counts(start + 300)
    for source in range(len(parts)):
        assert positions[sources == source].tolist() == list(range(before[source], after[source]))
    assert sum(before) == start


def test_a_blend_with_the_largest_weights_keeps_its_bound() -> None:
    parts = whole_parts([Fraction(1, 3), Fraction(314159, 10**6), Fraction(1, 10**5), Fraction(7, 50)])
    assert MAX_TOTAL / 2 < sum(parts) <= MAX_TOTAL
    sources, _ = Blend(parts).locate(np.arange(sum(parts)))
    counts = np.cumsum(sources[:, None] == np.arange(4), axis=0)
    shares = np.arange(1, sum(parts) + 1)[:, None] * (np.array(parts) / sum(parts))
    assert np.abs(counts - shares).max() < 1


def test_decimal_weights_are_exact() -> None:
    assert whole_parts([Fraction("0.3"), Fraction("0.7")]) == (3, 7)
    assert whole_parts([Fraction(2), Fraction(4), Fraction("0.5")]) == (4, 8, 1)
    with pytest.raises(UserError, match="less than one in"):
        whole_parts([Fraction(1), Fraction(1, 10**9)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", [("a", None)]),
        (("a", "b"), [("a", None), ("b", None)]),
        ((0.25, "a", 3, "b"), [("a", Fraction(1, 4)), ("b", Fraction(3))]),
        (("30", "a", "70", "b"), [("a", Fraction(30)), ("b", Fraction(70))]),
        ((1, "a", 0, "b"), [("a", Fraction(1))]),
    ],
)
def test_paths_are_parsed_as_in_megatron(value: Paths, expected: list[tuple[str, Fraction | None]]) -> None:
    assert list(parse_paths("data.data_path", value)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((), "neither a prefix"),
        ((1, "a", "b"), "neither a prefix"),
        ((1, "a", 2, 3), "neither a prefix"),
        (("a", 1, "b"), "neither a prefix"),
        ((-1, "a", 2, "b"), "weights must be 0 or more"),
        ((0, "a", 0, "b"), "one above 0"),
        ((float("nan"), "a"), "neither a prefix"),
        (("a", "a"), "a is there twice"),
        (("1e999999999", "a", 1, "b"), "neither a prefix"),
        ((1, "a", "1e-999999999", "b"), "neither a prefix"),
    ],
)
def test_bad_paths_are_refused(value: Paths, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_paths("data.data_path", value)
