"""One outcome for all ranks: where one fails, all raise the same error, and none waits for the others for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron3d.comm.interface import ObjectCollectives
from megatron3d.errors import UserError

T = TypeVar("T")


def run_on_all_ranks(comm: ObjectCollectives, action: Callable[[], T]) -> list[T] | None:
    """Every rank's result of `action`, in rank order, on rank 0 (None elsewhere); ends when all ranks are done.

    Raises UserError with the problems of all ranks, each once; RuntimeError, naming the ranks, where one crashed.
    The action must not communicate.
    """
    result: T | None = None
    problems: tuple[str, ...] = ()
    crash: Exception | None = None
    try:
        result = action()
    except UserError as error:
        problems = error.problems
    except Exception as error:
        crash = error
    crashed = f"rank {comm.mesh.rank}: {crash!r}" if crash else None
    gathered = comm.gather_object((result, problems, crashed))
    everyone = ([], []) if gathered is None else _failures(gathered)
    all_problems, all_crashes = comm.broadcast_object(everyone)
    if all_crashes:
        raise RuntimeError("; ".join(all_crashes)) from crash
    UserError.collect(all_problems)
    return None if gathered is None else [result for result, _, _ in gathered]


def _failures(gathered: list[tuple[object, tuple[str, ...], str | None]]) -> tuple[list[str], list[str]]:
    """Distinct problems of people, and crashes, of all ranks."""
    problems = dict.fromkeys(problem for _, found, _ in gathered for problem in found)
    return list(problems), [crashed for _, _, crashed in gathered if crashed]
