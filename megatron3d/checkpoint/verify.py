"""Verification that a checkpoint is complete and undamaged, and search for the newest such one of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron3d.checkpoint.index import read_index
from megatron3d.checkpoint.publish import candidates
from megatron3d.checkpoint.read import find_damage
from megatron3d.errors import UserError

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


def newest_intact(root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint of a run (None: there is none), and the newer ones skipped, with reasons.

    Reads all bytes of what it finds, and never raises for the content of the folder.  A checkpoint later than the
    tracker is skipped, since its save was not finished, or the run was rolled back to before it.
    """
    return first_intact(candidates(root), verify)


def first_intact(
    found: Iterable[tuple[Path, str | None]], damage_of: Callable[[Path], Sequence[str]]
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first checkpoint without a refusal and without damage, and those skipped before it, with reasons."""
    skipped: list[tuple[Path, str]] = []
    for folder, refusal in found:
        problems = [refusal] if refusal else damage_of(folder)
        if not problems:
            return folder, skipped
        skipped.append((folder, "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if problems[3:] else "")))
    return None, skipped
