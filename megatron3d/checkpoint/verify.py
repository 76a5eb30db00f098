"""Verification that a checkpoint is complete and undamaged, and search for the newest such one of a run."""

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
    """Read all bytes of a checkpoint and return a sentence for each damage.

    Args:
        share: (i, n) reads only the i-th of n shares of the files.
    """
    try:
        return tuple(find_damage(folder, read_index(folder), share))
    except UserError as error:
        return error.problems


def verify_on_all_ranks(folder: Path, comm: ObjectCollectives, prefix: str = "") -> None:
    """Read all bytes of the tensors whose names start with `prefix`, each rank its share of the files.

    Every rank raises UserError with all damage.
    """
    share = comm.mesh.rank, comm.mesh.world_size
    run_on_all_ranks(
        comm, lambda: raise_if_damaged(folder, find_damage(folder, read_index(folder).with_prefix(prefix), share))
    )


def newest_intact(root: Path, comm: ObjectCollectives | None = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint of a run (None: there is none), and the newer ones skipped, with reasons.

    Never raises for the content of the folder.  A checkpoint later than the tracker is skipped, since its save was
    not finished, or the run was rolled back to before it.

    Args:
        comm: communicator of all ranks, which then read a share each and return the same answer.
    """
    skipped: list[tuple[Path, str]] = []
    for folder, refusal in _on_every_share(comm, lambda _: candidates(root))[0]:
        problems = [refusal] if refusal else _problems(folder, comm)
        if not problems:
            return folder, skipped
        skipped.append((folder, "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if problems[3:] else "")))
    return None, skipped


def _problems(folder: Path, comm: ObjectCollectives | None) -> list[str]:
    parts = _on_every_share(comm, lambda share: verify(folder, share))
    return list(dict.fromkeys(problem for part in parts for problem in part))


def _on_every_share(comm: ObjectCollectives | None, action: Callable[[tuple[int, int]], T]) -> list[T]:
    """Return the results of `action(share)` of all ranks, in rank order, on every rank."""
    if comm is None:
        return [action(WHOLE)]
    mesh = comm.mesh
    results: list[T] = comm.broadcast_object(run_on_all_ranks(comm, lambda: action((mesh.rank, mesh.world_size))))
    return results
