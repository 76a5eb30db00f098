"""Fact: an invalid schedule is refused with the file, the rank, the action and what it waits for."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.errors import UserError
from megatron3d.pipeline.actions import Schedule, parse_action
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.validate import MAX_PROBLEMS, execution_problems, read_schedule, write_schedule
from tests.support.dependencies import dual_pipe_v


def parse(*rows: str) -> Schedule:
    return tuple(tuple(parse_action(text) for text in row.split()) for row in rows)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (("0F0 0B0", "1F0"), ["rank 1: 1I0 or 1B0 is missing", "rank 1: 1W0 or 1B0 is missing"]),
        (("0F0 0I0", "1F0 1B0"), ["rank 0: 0W0 or 0B0 is missing"]),
        (("0F0 0F0 0B0",), ["rank 0: 0F0 repeats an earlier action; name it once"]),
        (("0F0 0B0 0W0",), ["rank 0: 0W0 repeats an earlier action; name it once"]),
        (("0F0 0B0", "0F1 0B1"), ["rank 1: 0F1 belongs to stage 0, which rank 0 has"] * 1),
        (("0F0 0B0", ""), ["rank 1 has no actions; give it a stage, or use one rank less"]),
        ((), ["there are no actions; give a row of actions per rank, such as 0F0,0B0"]),
        (("0F0 0B0", "2F0 2B0"), ["stage 1 is missing, though there are 2; number them from 0"]),
        (("0F1 0B1",), ["microbatch 0 is missing, though there are 1; number them from 0"]),
        (
            ("0B0 0F0",),
            ["rank 0: 0B0, action 1 of 2, waits for 0F0, its own action 2, and can never start; put 0F0 earlier"],
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            [
                "rank 0: 0B0, action 2 of 4, waits for 1B0, action 3 of rank 1, and can never start; put 1B0 earlier",
                "rank 1: 1F1, action 2 of 4, waits for 0F1, action 3 of rank 0, and can never start; put 0F1 earlier",
            ],
        ),
    ],
)
def test_what_is_wrong_is_named(rows: tuple[str, ...], found: list[str]) -> None:
    assert execution_problems(parse(*rows))[: len(found)] == found


@given(name=st.sampled_from(list(SCHEDULES)), p=st.integers(1, 5), m=st.integers(1, 9), seed=st.integers())
def test_every_damaged_schedule_is_refused(name: str, p: int, m: int, seed: int) -> None:
    """A missing, duplicated or misplaced action of any schedule is found and named."""
    draw = random.Random(seed)
    schedule = [list(actions) for actions in build_schedule(name, p, m)]
    rank = draw.randrange(p)
    place = draw.randrange(len(schedule[rank]))
    action = schedule[rank].pop(place)
    for damaged in ([], [action, action]):
        rows = [*schedule[:rank], [*schedule[rank][:place], *damaged, *schedule[rank][place:]], *schedule[rank + 1 :]]
        found = execution_problems(tuple(map(tuple, rows)))
        assert found and len(found) <= MAX_PROBLEMS
    reversed_ranks = tuple(tuple(reversed(actions)) for actions in build_schedule(name, p, m))
    assert "waits for" in execution_problems(reversed_ranks)[0]


@given(name=st.sampled_from(list(SCHEDULES)), p=st.integers(1, 5), m=st.integers(1, 9))
def test_a_schedule_file_is_read_as_written(
    name: str, p: int, m: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    schedule = build_schedule(name, p, m)
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule


def test_many_ranks_in_reverse_order_take_seconds() -> None:
    """Each stage waits for the one on the rank after its own, so that one turn of all ranks runs one action."""
    num_ranks = 10_000
    begin = time.process_time()
    found = execution_problems(tuple(parse(*(f"{stage}F0 {stage}B0" for stage in reversed(range(num_ranks))))))
    assert found == [] and time.process_time() - begin < 5


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "schedule.csv")
    with pytest.raises(UserError, match=r"schedule\.csv: cannot be read"):
        read_schedule(tmp_path / "schedule.csv")


def test_idle_cells_and_blank_last_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("\ufeff0F0,,, 0B0 \r\n,1F0,1B0,\r\n\r\n,,\r\n", encoding="utf-8")
    assert read_schedule(path) == parse("0F0 0B0", "1F0 1B0")


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (4, 8), (4, 10)])
def test_torchs_overlapped_forwards_and_backwards_are_read(p: int, m: int, tmp_path: Path) -> None:
    """Every pair of torch's DualPipeV is a forward and then a backward, the order in which torch starts them."""
    path = tmp_path / "schedule.csv"
    rows = dual_pipe_v(p, m)
    path.write_text("\n".join(map(",".join, rows)))
    assert any("OVERLAP_F_B" in cell for row in rows for cell in row)
    separate = ([re.sub(r"\((.*);(.*)\)OVERLAP_F_B", r"\1 \2", cell) for cell in row] for row in rows)
    assert read_schedule(path) == parse(*map(" ".join, separate))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there are no actions"),
        (b"0F0,0Q0\n", "rank 0, cell 2: '0Q0' is no action such as 0F3"),
        (b"0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0", "rank 0, cell 2: 0SEND_F0 is no computation; leave it out"),
        (b"0F0,(0F1;0B0)OVERLAP_F_B\n", "rank 0: 0I1 or 0B1 is missing"),
        (b"0F0,(0F1;0W0)OVERLAP_F_B\n", "rank 0, cell 2: '(0F1;0W0)OVERLAP_F_B' is no forward with a backward"),
        (b"0F0,(0F1)OVERLAP_F_B\n", "rank 0, cell 2: '(0F1)OVERLAP_F_B' is no action such as 0F3"),
        (b"0F0,(0SEND_F0;0B0)OVERLAP_F_B\n", "rank 0, cell 2: '(0SEND_F0;0B0)OVERLAP_F_B' is no forward"),
        (b"0F0,((0F1;0B0)OVERLAP_F_B;0B1)OVERLAP_F_B\n", "rank 0, cell 2: '((0F1;0B0)OVERLAP_F_B"),
        (b"0F0\n", "rank 0: 0I0 or 0B0 is missing"),
        (b"\xff\xfe0", "cannot be read"),
        (b"0F99999999999,0B99999999999\n", "microbatch 0 is missing"),
        (b"0F" + b"9" * 5000, "9...' is no action such as 0F3"),
        ("0F٣,0B٣".encode(), "is no action such as 0F3"),
        (b"0" * 200_000, "cannot be read: field larger than field limit"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_not_a_schedule_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_schedule(path)
    assert message in str(error.value) and all(str(path) in problem for problem in error.value.problems)
