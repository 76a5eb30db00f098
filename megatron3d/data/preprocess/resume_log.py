"""The ledger of a job: a line of JSON for what the job is, then one for each point from which it can go on.

Data is written before the line that counts it; after a kill at any moment everything behind the last whole line is cut
off and done again.  The ledger is locked while a process works on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron3d.data.token_files.files import cut, hold, write_all, writing
from megatron3d.data.token_files.writer import WrittenCounts
from megatron3d.errors import UserError


@dataclass(frozen=True)
class ResumePoint:
    """A point to go on from.

    Attributes:
        piece: number of the piece, and `position` in it, of the next record; None for its start.
        written: how far each key's corpus is.
        is_done: whether all input is read, so that only names are missing.
    """

    piece: int = 0
    position: int | None = None
    num_documents: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    is_done: bool = False
    written: tuple[WrittenCounts, ...] = ()


class ResumeLog:
    """Opens or begins the ledger of a job.

    Raises:
        UserError: it is of another job, another process works on it, or it cannot be written.
    """

    def __init__(self, path: Path, job: Mapping[str, JsonValue], restart: bool = False) -> None:
        self.path, self._file = path, hold(path)
        found, self.entries, size = _sound(b"" if restart else self._file.readall())
        if found is not None:
            self._require_same(found, job)
        cut(self._file, size)
        if found is None:
            self._begin(job)

    def _begin(self, job: Mapping[str, JsonValue]) -> None:
        try:
            self._append(job)
        except UserError:
            self.remove()
            raise

    def write(self, entry: ResumePoint) -> None:
        """Add a point to go on from."""
        self._append(asdict(entry))
        self.entries.append(entry)

    def close(self) -> None:
        """Let others have it."""
        self._file.close()

    def remove(self) -> None:
        """The job is done, or there is nothing to go on from."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        with writing(self.path):
            write_all(self._file, (json.dumps(values) + "\n").encode())
            os.fsync(self._file.fileno())

    def _require_same(self, found: Mapping[str, Any], job: Mapping[str, JsonValue]) -> None:
        differing = [name for name in job if found.get(name) != job[name]]
        if differing:
            self.close()
            raise UserError(
                f"{self.path}: an unfinished job with another {', another '.join(differing)} is here; repeat its "
                "command, give another --output-prefix, or --restart to drop what it did"
            )


def _sound(content: bytes) -> tuple[dict[str, Any] | None, list[ResumePoint], int]:
    """The job, if any, and its entries up to the first line that is not whole, with the bytes up to there."""
    job: dict[str, Any] | None = None
    entries: list[ResumePoint] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            values = dict(json.loads(line))
            if not line.endswith(b"\n"):
                break
            if job is None:
                job = values
            else:
                entries.append(_entry(values))
        except (ValueError, TypeError, KeyError):
            break
        size += len(line)
    return job, entries, size


def _entry(values: Mapping[str, Any]) -> ResumePoint:
    written = tuple(WrittenCounts(**counts) for counts in values["written"])
    return ResumePoint(**{**values, "written": written})
