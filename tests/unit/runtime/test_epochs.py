"""Fact: the next ranks of an elastic run are those that lose the least, and every process reads the same of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from megatron3d.errors import RunFailed
from megatron3d.runtime.epochs import Epoch, Member, Note, choose, newest

BEFORE = Epoch(3, (0, 1, 2, 3), layout={"changes": "present"}, spares=(4,))
NEW = {"changes": "planned"}


def plan(num_ranks: int) -> tuple[int, Mapping[str, Any]]:
    """Plan the largest power of two; three ranks have none."""
    if num_ranks == 3:
        raise RunFailed("no layout")
    return 1 << num_ranks.bit_length() - 1, NEW


@pytest.mark.parametrize(
    ("here", "slow", "has_new", "members", "layout"),
    [
        ([0, 1, 2, 3, 4], (), False, (0, 1, 2, 3), BEFORE.layout),
        ([0, 2, 3, 4], (), False, (0, 4, 2, 3), BEFORE.layout),  # a spare takes the lost one's rank
        ([2, 4], (), False, (2, 4), NEW),
        ([0, 2], (), False, (0, 2), NEW),
        ([0, 1, 2, 3, 4], (0,), False, (4, 1, 2, 3), BEFORE.layout),
        ([0, 1, 2], (2,), False, (0, 1), NEW),
        ([0, 1, 2, 3], (3,), False, (0, 1, 2, 3), BEFORE.layout),  # three have no layout
        ([0, 1], (0, 1), False, (0, 1), NEW),
        ([0, 1, 2, 3, 4, 5], (), True, (0, 1, 2, 3), BEFORE.layout),  # six have none of more than four
        ([*range(8)], (), True, (*range(8),), NEW),
        ([0, 1, 2, 7], (), True, (0, 1, 2, 7), BEFORE.layout),
    ],
)
def test_choice(
    here: Sequence[int], slow: Collection[int], has_new: bool, members: tuple[int, ...], layout: Mapping[str, Any]
) -> None:
    assert choose(BEFORE, here, slow, plan, has_new=has_new) == (members, layout)


def test_no_layout_is_an_error() -> None:
    with pytest.raises(RunFailed):
        choose(BEFORE, [0, 1, 2], (), plan, has_new=False)


def test_records_are_read_as_they_were_written() -> None:
    joined = (Member(8, "host", 1, 2, "machine", 3),)
    epoch = Epoch(4, (0, 8), 1, {"changes": {}}, (2,), (3,), (5,), (3,), joined, (8,), {"agree": 0.5})
    note = Note(2, epoch, (1,), holds=True, slow=(3,))
    assert Note.of(json.dumps(asdict(note))) == note
    assert newest({0: note, 1: Note(1, BEFORE, ())}) == epoch
