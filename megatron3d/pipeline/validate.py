"""Validation of schedules, and their CSV files: each action once, each stage on one rank, no deadlock."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.pipeline.actions import COMPUTATIONS, Action, ActionKind, Schedule, completed_by, parse_cell
from megatron3d.pipeline.simulate import Deadlock, execution_order
from megatron3d.runtime.arguments import MAX_SCHEDULE_SIZE, read_limited
from megatron3d.runtime.files import write_text

MAX_PROBLEMS = 10
# Three actions of 20 characters for each forward of the largest schedule.
MAX_SCHEDULE_BYTES = 60 * MAX_SCHEDULE_SIZE


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a CSV file: a row per rank, a cell per action, empty cells ignored (torch's compute_only).

    A cell of torch's OVERLAP_F_B, which its DualPipeV has, is two actions.

    Raises UserError with the file, the rank and the cell where the file cannot be read or the schedule cannot run.
    """
    try:
        text = read_limited(path, MAX_SCHEDULE_BYTES).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}; give a CSV with a row of actions per rank") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    bad: list[str] = []
    ranks = [tuple(_cells(row, f"{path}: rank {rank}", bad)) for rank, row in enumerate(rows)]
    UserError.collect(bad[:MAX_PROBLEMS])
    UserError.collect(f"{path}: {problem}" for problem in execution_problems(tuple(ranks)))
    return tuple(ranks)


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a CSV file that `read_schedule` and torch.distributed.pipelining read."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule)
    write_text(path, text.getvalue())


def _cells(row: list[str], where: str, bad: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(row, 1):
        if not cell.strip():
            continue
        try:
            actions = parse_cell(cell)
        except ValueError as error:
            bad.append(f"{where}, cell {column}: {error}")
            continue
        if transfers := [action for action in actions if action.kind not in COMPUTATIONS]:
            rule = "is no computation; leave it out, send/recv are added later"
            bad.append(f"{where}, cell {column}: {transfers[0]} {rule}")
        else:
            yield from actions


def execution_problems(schedule: Schedule) -> list[str]:
    """Return why a schedule cannot run, at most ten sentences with the rank, the action and what is wrong."""
    found = list(islice(_coverage_problems(schedule), MAX_PROBLEMS))
    if found:
        return found
    try:
        execution_order(schedule)
    except Deadlock as deadlock:
        return list(islice(_deadlock_problems(schedule, deadlock), MAX_PROBLEMS))
    return []


def _coverage_problems(schedule: Schedule) -> Iterator[str]:
    """Yield actions that are repeated, missing or on another rank than the rest of their stage."""
    where: dict[int, int] = {}
    done: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule):
        if not actions:
            yield f"rank {rank} has no actions; give it a stage, or use one rank less"
        for action in actions:
            if where.setdefault(action.stage, rank) != rank:
                yield f"rank {rank}: {action} belongs to stage {action.stage}, which rank {where[action.stage]} has"
            for result in completed_by(action):
                done[result] += 1
                if done[result] == 2:
                    yield f"rank {rank}: {action} repeats an earlier action; name it once"
    if not where:
        yield "there are no actions; give a row of actions per rank, such as 0F0,0B0"
    microbatches = {result.mb for result in done}
    for what, numbers in (("stage", set(where)), ("microbatch", microbatches)):
        if gaps := set(range(len(numbers))) - numbers:
            yield f"{what} {min(gaps)} is missing, though there are {len(numbers)}; number them from 0"
            return
    for stage in sorted(where):
        for mb in range(len(microbatches)):
            for kind in (ActionKind.F, ActionKind.I, ActionKind.W):
                if not done[Action(kind, stage, mb)]:
                    whole = "" if kind is ActionKind.F else f" or {stage}B{mb}"
                    yield f"rank {where[stage]}: {stage}{kind.value}{mb}{whole} is missing"


def _deadlock_problems(schedule: Schedule, deadlock: Deadlock) -> Iterator[str]:
    """Yield a sentence per rank that cannot continue: its action, and where the action that it waits for stands."""
    places = {
        result: (action, rank, position)
        for rank, actions in enumerate(schedule)
        for position, action in enumerate(actions, 1)
        for result in completed_by(action)
    }
    for rank, position, waits in deadlock.stuck:
        action, other, later = places[waits]
        place = f"its own action {later}" if other == rank else f"action {later} of rank {other}"
        yield (
            f"rank {rank}: {schedule[rank][position]}, action {position + 1} of {len(schedule[rank])}, waits for "
            f"{action}, {place}, and can never start; put {action} earlier"
        )
