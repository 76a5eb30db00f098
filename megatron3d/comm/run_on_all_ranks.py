"""Error handling across ranks: if one rank fails, all raise the same error, and none waits forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron3d.comm.interface import ObjectCollectives
from megatron3d.errors import UserError

T = TypeVar("T")


def run_on_all_ranks(comm: ObjectCollectives, action: Callable[[], T]) -> list[T] | None:
    """Run `action` on every rank; return the results in rank order on rank 0, None elsewhere.

    Returns when all ranks are done.  Raises UserError with the distinct problems of all ranks (an OSError is one), or
    RuntimeError naming the ranks where another exception occurred.  The action must not communicate.
    """
    result: T | None = None
    problems: tuple[str, ...] = ()
    crash: Exception | None = None
    try:
        result = action()
    except UserError as error:
        problems = error.problems
    except OSError as error:
        problems = UserError.of(error).problems
    except Exception as error:
        crash = error
    crashed = f"rank {comm.mesh.rank}: {crash!r}" if crash else None
    gathered = comm.gather_object((result, problems, crashed))
    failures = ([], []) if gathered is None else _collect_failures(gathered)
    all_problems, all_crashes = comm.broadcast_object(failures)
    if all_crashes:
        raise RuntimeError("; ".join(all_crashes)) from crash
    UserError.collect(all_problems)
    return None if gathered is None else [result for result, _, _ in gathered]


def on_rank_0(comm: ObjectCollectives, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank; errors as `run_on_all_ranks`."""
    results: list[T] = []
    run_on_all_ranks(comm, lambda: results.append(action()) if comm.mesh.rank == 0 else None)
    result: T = comm.broadcast_object(results[0] if results else None)
    return result


def _collect_failures(gathered: list[tuple[object, tuple[str, ...], str | None]]) -> tuple[list[str], list[str]]:
    """Return the distinct UserError problems and the other exceptions of all ranks."""
    problems = dict.fromkeys(problem for _, found, _ in gathered for problem in found)
    return list(problems), [crashed for _, _, crashed in gathered if crashed]
