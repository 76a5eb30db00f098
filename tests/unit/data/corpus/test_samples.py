"""Fact: every window of an epoch is read exactly once, in an order that is a function of (seed, i) alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron3d.data.corpus.plan import Split, parse_split, permute, sample_offsets, split_tokens
from megatron3d.errors import UserError


def keys(value: int, count: int) -> np.ndarray:
    return np.full(count, value, np.uint64)


@settings(deadline=None)
@given(size=st.integers(1, 2000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection_of_any_size(size: int, key: int) -> None:
    images = permute(np.arange(size), size, keys(key, size))
    assert np.array_equal(np.sort(images), np.arange(size))


@settings(deadline=None)
@given(size=st.integers(2**31, 2**62), position=st.integers(0, 2**31 - 64), key=st.integers(0, 2**64 - 1))
def test_permutation_of_a_huge_corpus_stays_inside_and_never_repeats(size: int, position: int, key: int) -> None:
    images = permute(position + np.arange(64), size, keys(key, 64))
    assert images.min() >= 0 and images.max() < size and len(np.unique(images)) == 64


@settings(deadline=None)
@given(
    first=st.integers(0, 1000),
    tokens=st.integers(2, 3000),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 5),
)
def test_every_epoch_holds_every_window_once(first: int, tokens: int, seq_length: int, seed: int, epoch: int) -> None:
    split = Split(first, max(tokens, seq_length + 1))
    windows = split.num_windows(seq_length)
    offsets = sample_offsets(split, seq_length, seed, epoch * windows + np.arange(windows))
    assert np.array_equal(np.sort(offsets), first + seq_length * np.arange(windows))
    assert offsets.max() + seq_length + 1 <= first + split.num_tokens


@settings(deadline=None)
@given(samples=st.lists(st.integers(0, 10**12), min_size=1, max_size=20), seed=st.integers(0, 2**32))
def test_a_sample_does_not_depend_on_what_is_read_with_it(samples: list[int], seed: int) -> None:
    split = Split(5, 12345)
    together = sample_offsets(split, 7, seed, np.array(samples))
    alone = [int(sample_offsets(split, 7, seed, np.array([sample]))[0]) for sample in samples]
    assert together.tolist() == alone


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    offsets = sample_offsets(Split(100, 1001), 10, 1234, np.array([0, 1, 2, 99, 100, 10**9]))
    assert offsets.tolist() == [910, 610, 790, 490, 790, 190]


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(sample_offsets(Split(0, 101), 1, seed, epoch * 100 + np.arange(100)).tolist())

    assert len({order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


@pytest.mark.parametrize("size", [10, 64, 97])
def test_every_position_is_equally_likely(size: int) -> None:
    draws = 20_000
    spread = np.random.default_rng(0).integers(0, 2**64, draws, dtype=np.uint64)
    counts = np.bincount(permute(np.full(draws, 3), size, spread), minlength=size)
    chi_square = float(((counts - draws / size) ** 2 / (draws / size)).sum())
    assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


def test_without_a_seed_windows_come_in_order_and_wrap_around() -> None:
    assert sample_offsets(Split(3, 10), 4, None, np.arange(5)).tolist() == [3, 7, 3, 7, 3]


@settings(deadline=None)
@given(tokens=st.integers(0, 10**12), weights=st.tuples(*[st.integers(0, 1000)] * 3).filter(any))
def test_splits_are_adjacent_and_cover_the_corpus(tokens: int, weights: tuple[int, int, int]) -> None:
    splits = split_tokens(tokens, ",".join(map(str, weights)))
    end = 0
    for split, weight in zip(splits, weights, strict=True):
        assert split.first_token == end and abs(split.num_tokens - tokens * weight / sum(weights)) <= 1 + tokens * 1e-15
        end += split.num_tokens
    assert end == tokens


def test_a_90_10_split_equals_nanogpts() -> None:
    train, valid, test = split_tokens(1_115_394, "90,10,0")
    assert (train.num_tokens, valid.num_tokens, test.num_tokens) == (1_003_854, 111_540, 0)
    assert split_tokens(1_115_394, " 0.9, 0.1,0") == (train, valid, test)


@pytest.mark.parametrize(
    "split", ["", "90,10", "90,10,0,0", "a,b,c", "-1,1,1", "0,0,0", "nan,1,1", "1/0,1,1", "1e999999999,1,1"]
)
def test_a_bad_split_is_refused(split: str) -> None:
    with pytest.raises(UserError, match=r"data\.split="):
        parse_split(split)
