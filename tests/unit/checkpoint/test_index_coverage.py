"""Fact: `flaw` accepts boxes exactly when they cover every element of a tensor; `overlap` is their intersection."""

from __future__ import annotations

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.checkpoint.index import coverage_error, intersection, slices_within

SHAPE = (4, 3)
edges = [st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted).map(tuple) for size in SHAPE]
boxes = st.tuples(*edges)


def count(found, shape=SHAPE):
    """Return the number of boxes that hold each element."""
    times = torch.zeros(shape, dtype=torch.int64)
    for box in found:
        times[tuple(slice(*ends) for ends in box)] += 1
    return times


@st.composite
def tilings(draw, box=tuple((0, size) for size in SHAPE)):
    """Draw a tiling: split a box in two repeatedly."""
    dim = draw(st.integers(0, len(box) - 1))
    low, high = box[dim]
    if high - low < 2 or draw(st.booleans()):
        return [box]
    cut = draw(st.integers(low + 1, high - 1))
    halves = [(*box[:dim], ends, *box[dim + 1 :]) for ends in ((low, cut), (cut, high))]
    return [piece for half in halves for piece in draw(tilings(half))]


@given(tilings())
def test_a_tiling_has_no_flaw(pieces):
    assert coverage_error(SHAPE, pieces) is None
    assert coverage_error(SHAPE, pieces[1:]) is not None
    assert coverage_error(SHAPE, [*pieces, pieces[-1]]) is not None


@given(st.lists(boxes, max_size=4))
def test_random_boxes_have_a_flaw_or_tile(found):
    assert (coverage_error(SHAPE, found) is None) == bool((count(found) == 1).all())


@given(boxes, boxes)
def test_overlap(a, b):
    common = intersection(a, b)
    both = (count([a]) + count([b])) == 2
    assert bool(both.any()) == (common is not None)
    if common:
        assert torch.equal(count([common]) == 1, both)
        numbers = torch.arange(12).reshape(SHAPE)
        held = numbers[tuple(slice(*ends) for ends in a)]
        assert torch.equal(held[slices_within(common, a)], numbers[tuple(slice(*ends) for ends in common)])


def test_many_staggered_boxes_take_seconds():
    """Each of 40,000 boxes shares rows with all others, so comparing them with each other would take minutes."""
    size = 40_000
    pieces = [((low, low + size), (low, low + 1)) for low in range(size)]
    begin = time.process_time()
    assert coverage_error((2 * size, size), pieces) == "elements [0:1,1:40000] are in 0 boxes instead of one"
    assert time.process_time() - begin < 5


def test_the_text_of_a_coverage_error():
    assert coverage_error((), [()]) is None
    assert coverage_error((), []) == "elements [] are in 0 boxes instead of one"
    assert coverage_error((4, 2), [((0, 2), (0, 2))]) == "elements [2:4,0:2] are in 0 boxes instead of one"
    assert coverage_error((4,), [((0, 3),), ((2, 4),)]) == "elements [2:3] are in 2 boxes instead of one"
    assert coverage_error((4,), [((0, 5),)]) == "box [0:5] is not inside a tensor of [4]"
    assert coverage_error((4, 2), [((0, 4),)]) == "box [0:4] is not inside a tensor of [4, 2]"
