"""Fact: the diagnosis names the rank that keeps the others waiting, with the group and the collective that it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from megatron3d.runtime.heartbeat import GroupStatus, Heartbeat, diagnose

FIRST = Heartbeat(
    7,
    "node1",
    10,
    5,
    40,
    "all_reduce over data, the 40th",
    ("train/loop.py:9 train", "comm/process_comm.py:3 finish"),
    60.0,
)
BUSY = ("train/loop.py:9 train", "data/loader.py:5 step")


def later(beat: Heartbeat, **changes: object) -> Heartbeat:
    return replace(beat, sequence=beat.sequence + 3, **changes)


def test_a_rank_whose_heartbeat_stops_is_at_fault() -> None:
    before = {0: FIRST, 1: FIRST, 2: None, 3: FIRST}
    after = {0: later(FIRST), 1: FIRST, 2: None, 3: later(FIRST)}
    lines = list(diagnose(before, after))
    assert lines[0].startswith("rank 1 does not answer (host node1, process 10): after iteration 5, in train/loop.py:9")
    assert lines[1] == "rank 2 does not answer and never sent a heartbeat"
    assert lines[2] == (
        "ranks 0, 3: after iteration 5, in train/loop.py:9 train > comm/process_comm.py:3 finish; "
        "last collective all_reduce over data, the 40th"
    )
    assert len(lines) == 3


def test_a_rank_outside_collectives_is_at_fault() -> None:
    after = {0: later(FIRST), 1: later(FIRST, stack=BUSY), 2: later(FIRST)}
    lines = list(diagnose(dict.fromkeys(after, FIRST), after))
    assert lines[0].startswith("rank 1 keeps the others waiting (host node1") and "data/loader.py:5 step" in lines[0]


def test_the_rank_with_fewest_collectives_is_at_fault() -> None:
    """On GPUs kernels wait and all programs are at the same line, so that only the collective counts differ."""
    after = {0: later(FIRST), 1: later(FIRST), 2: later(FIRST, num_collectives=39), 3: later(FIRST)}
    lines = list(diagnose(dict.fromkeys(after, FIRST), after))
    assert lines[0].startswith("rank 2 has done the least")
    everyone = {rank: later(FIRST) for rank in range(20)}
    lines = list(diagnose(dict.fromkeys(everyone, FIRST), everyone))
    assert len(lines) == 20 and "waits, as all do" in lines[0]


def test_ranks_at_one_place_are_one_line() -> None:
    after = {rank: later(FIRST, stack=BUSY if rank == 3 else FIRST.stack) for rank in range(20)}
    lines = list(diagnose(dict.fromkeys(after, FIRST), after))
    assert lines[1].startswith("ranks 0, 1, 2, 4, 5, 6, 7, 8 and 11 more: after iteration 5")


def test_many_ranks_at_fault_are_few_lines() -> None:
    after = {rank: later(FIRST) for rank in range(4000)}
    lines = list(diagnose(dict.fromkeys(after, FIRST), after))
    assert len(lines) == 33 and lines[-1] == "and 3968 more ranks: 32, 33, 34, 35, 36, 37, 38, 39 and 3960 more"


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    beat = replace(FIRST, groups={"data@0": GroupStatus(3, "all_reduce", 2, "all_gather")})
    assert Heartbeat.from_json(json.dumps(asdict(beat))) == beat


def verdict(groups: Mapping[int, Mapping[str, GroupStatus]]) -> list[str]:
    """Return the lines about ranks that all run on while kernels wait, as with NCCL."""
    after = {rank: later(FIRST, stack=BUSY, groups=status) for rank, status in groups.items()}
    return list(diagnose(dict.fromkeys(after, FIRST), after))


def waits(number: int, op: str = "all_reduce") -> GroupStatus:
    return GroupStatus(number, op, number, op)


def test_the_rank_that_lacks_a_collective_is_named_with_group_and_collective() -> None:
    """Bug that this finds: counts of all groups together, which are equal here, since rank 2 has run ahead in another.

    Ranks 0 and 1 wait for rank 2 over data, and rank 3 waits for rank 1 over tensor.
    """
    data, tensor = {0: waits(41), 1: waits(41), 2: waits(40, "all_gather")}, {1: waits(7), 3: waits(8, "all_gather")}
    ahead = GroupStatus(9, "reduce_scatter", 8, "reduce_scatter")
    lines = verdict(
        {
            0: {"data@0": data[0], "x@0": waits(9, "reduce_scatter")},
            1: {"data@0": data[1], "tensor@1": tensor[1]},
            2: {"data@0": data[2], "x@0": ahead},
            3: {"tensor@1": tensor[3]},
        }
    )
    assert lines[0].startswith("rank 2 keeps the others waiting (host node1, process 10): after iteration 5")
    assert lines[1] == (
        "rank 2 has started 40 collectives over data, the last all_gather; ranks 0, 1 wait there for the 41th, "
        "all_reduce"
    )
    assert len(lines) == 3 and lines[2].startswith("ranks 0, 1, 3: ")


def test_a_transfer_that_was_only_posted_waits_for_nobody() -> None:
    """Bug that this finds: rank 1 posts its next receive, and so looks as if it waited for rank 0, which it blocks."""
    link, data = "pipeline 0>1@0", "data@0"
    lines = verdict(
        {
            0: {link: GroupStatus(4, "send", 3, "send"), data: waits(2)},
            1: {link: GroupStatus(5, "receive", 4, "receive"), data: waits(1)},
        }
    )
    assert lines[0].startswith("rank 1 keeps the others waiting")
    assert lines[1] == (
        "rank 1 has started 1 collectives over data, the last all_reduce; rank 0 waits there for the 2th, all_reduce"
    )


def test_a_rank_that_has_started_nothing_is_named() -> None:
    lines = verdict({0: {"data@0": waits(1)}, 1: {"data@0": GroupStatus(0, "")}})
    assert lines[1] == "rank 1 has started 0 collectives over data; rank 0 waits there for the 1th, all_reduce"


def test_ranks_that_call_different_collectives_are_named() -> None:
    lines = verdict({0: {"x@0": waits(3)}, 1: {"x@0": waits(3, "all_gather")}, 2: {"x@0": waits(3)}})
    line = "ranks call different collectives over x: the 3th is all_reduce on ranks 0, 2, all_gather on rank 1"
    assert line in lines


def test_both_ends_of_a_link_call_the_same() -> None:
    lines = verdict({0: {"pipeline 0>1@0": waits(3, "send")}, 1: {"pipeline 0>1@0": waits(3, "receive")}})
    assert not any("different" in line for line in lines)
