"""Whether a checkpoint is complete and undamaged to the last bit, and which is the newest of a run that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron3d.checkpoint.index import read_index
from megatron3d.checkpoint.publish import candidates
from megatron3d.checkpoint.read import find_damage, raise_if_damaged
from megatron3d.comm.interface import ObjectCollectives
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.errors import UserError

T = TypeVar("T")
WHOLE = (0, 1)


def verify(folder: Path, share: tuple[int, int] = WHOLE) -> tuple[str, ...]:
    """Everything that is wrong with a checkpoint, a sentence each; all its bytes are read and compared with checksums.

    Args:
        share: (i, n) reads only the i-th of n parts of the files.
    """
    try:
        return tuple(find_damage(folder, read_index(folder), share))
    except UserError as error:
        return error.problems


def verify_on_all_ranks(folder: Path, comm: ObjectCollectives, prefix: str = "") -> None:
    """Read all bytes of the tensors whose names begin so, each rank a part of the files.

    Every rank raises UserError with all that is wrong.
    """
    share = comm.mesh.rank, comm.mesh.world_size
    run_on_all_ranks(
        comm, lambda: raise_if_damaged(folder, find_damage(folder, read_index(folder).with_prefix(prefix), share))
    )


def newest_intact(root: Path, comm: ObjectCollectives | None = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete and undamaged checkpoint of a run, and the newer ones that were passed over, with reasons.

    Never raises for what lies in the folder: None where nothing is good.  A checkpoint beyond the tracker is passed
    over, since its save was not finished, or the run has gone back to before it.

    Args:
        comm: of all ranks, which then read a part each and come to the same answer.
    """
    passed: list[tuple[Path, str]] = []
    for folder, refusal in _everywhere(comm, lambda _: candidates(root))[0]:
        problems = [refusal] if refusal else _problems(folder, comm)
        if not problems:
            return folder, passed
        passed.append((folder, "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if problems[3:] else "")))
    return None, passed


def _problems(folder: Path, comm: ObjectCollectives | None) -> list[str]:
    parts = _everywhere(comm, lambda share: verify(folder, share))
    return list(dict.fromkeys(problem for part in parts for problem in part))


def _everywhere(comm: ObjectCollectives | None, action: Callable[[tuple[int, int]], T]) -> list[T]:
    """What `action(my share)` gives on every rank, in rank order, on every rank."""
    if comm is None:
        return [action(WHOLE)]
    mesh = comm.mesh
    results: list[T] = comm.broadcast_object(run_on_all_ranks(comm, lambda: action((mesh.rank, mesh.world_size))))
    return results
