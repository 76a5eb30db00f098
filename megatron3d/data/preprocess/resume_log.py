"""The log from which a killed preprocessing job resumes: a line of JSON identifies the job, each further line a point.

Data is written before the line that counts it.  After a kill, data after the last complete line is truncated and
written again.  The file, PREFIX.ledger.jsonl, is locked while a process works on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron3d.data.token_files.files import AppendOnlyFile
from megatron3d.data.token_files.writer import WrittenCounts
from megatron3d.errors import UserError


@dataclass(frozen=True)
class ResumePoint:
    """A point from which a job can resume; the names of its fields are those in the file.

    Attributes:
        piece: number of the input chunk of the next record, and `position` in it; None for its start.
        written: counts of each key's token file.
        is_done: whether all input is read, so that only publishing is left.
    """

    piece: int = 0
    position: int | None = None
    num_documents: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    is_done: bool = False
    written: tuple[WrittenCounts, ...] = ()


class ResumeLog:
    """Opens the log of a job, or begins it.

    Attributes:
        points: the points in the file, oldest first.

    Raises:
        UserError: it is the log of another job, another process works on it, or it cannot be written.
    """

    def __init__(self, path: Path, job: Mapping[str, JsonValue], restart: bool = False) -> None:
        self._file = AppendOnlyFile(path, size=None)
        found, self.points, size = _parse(b"" if restart else path.read_bytes())
        if differing := [name for name in job if found is not None and found.get(name) != job[name]]:
            self.close()
            raise UserError(
                f"{path}: an unfinished job with another {', another '.join(differing)} is here; repeat its "
                "command, give another --output-prefix, or --restart to drop what it did"
            )
        self._file.truncate(size)
        if found is None:
            try:
                self._append(job)
            except UserError:
                self.remove()
                raise

    def write(self, point: ResumePoint) -> None:
        """Append a point durably."""
        self._append(asdict(point))
        self.points.append(point)

    def close(self) -> None:
        """Release the log to other processes."""
        self._file.close()

    def remove(self) -> None:
        """Delete the log: the job is done, or there is nothing to resume from."""
        self._file.discard()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._file.append((json.dumps(values) + "\n").encode())
        self._file.sync()


def _parse(content: bytes) -> tuple[dict[str, Any] | None, list[ResumePoint], int]:
    """Return the job, if any, its points up to the first incomplete line, and the number of bytes up to there."""
    job: dict[str, Any] | None = None
    points: list[ResumePoint] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            values = dict(json.loads(line))
            if not line.endswith(b"\n"):
                break
            if job is None:
                job = values
            else:
                written = tuple(WrittenCounts(**counts) for counts in values["written"])
                points.append(ResumePoint(**{**values, "written": written}))
        except (ValueError, TypeError, KeyError):
            break
        size += len(line)
    return job, points, size
