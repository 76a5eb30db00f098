"""The log from which a killed preprocessing job resumes: a line of JSON identifies the job, each further line a point.

Data is written before the line that counts it.  After a kill, data after the last valid line is truncated and written
again.  The `crc32` of a line covers it and all lines before; the counts of a point have those of the written files.
The file, PREFIX.ledger.jsonl, is locked while a process works on it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

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


_POINT = TypeAdapter(ResumePoint)


class ResumeLog:
    """Opens the log of a job, or begins it.

    Attributes:
        points: the points in the file, oldest first.
        faults: a description of the lines that were dropped because they are damaged, if any.

    Raises:
        UserError: it is the log of another job, or of an older version without checksums; another process works on
            it, or it cannot be written.
    """

    def __init__(self, path: Path, job: Mapping[str, JsonValue], restart: bool = False) -> None:
        self._file = AppendOnlyFile(path, size=None)
        self._crc32 = 0
        self.points: list[ResumePoint] = []
        self.faults: tuple[str, ...] = ()
        try:
            size = 0 if restart else self._read(path, job)
            self._file.truncate(size)
        except UserError:
            self.close()
            raise
        if not size:
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
        self._crc32 = _checksum(values, self._crc32)
        self._file.append((json.dumps({**values, "crc32": self._crc32}) + "\n").encode())
        self._file.sync()

    def _read(self, path: Path, job: Mapping[str, JsonValue]) -> int:
        """Read the points up to the first line that is incomplete or damaged; return the number of bytes up to it."""
        content = path.read_bytes()
        first, *lines = content.splitlines(keepends=True) or [b""]
        values, crc32 = _parse(first, 0)
        if values is not None:
            _require_same(path, job, values, is_valid=crc32 is not None)
        size, self._crc32 = (0, 0) if crc32 is None else (len(first), crc32)
        for line in lines if size else ():
            values, crc32 = _parse(line, self._crc32)
            if crc32 is None or (point := _point(values)) is None:
                break
            self.points.append(point)
            size, self._crc32 = size + len(line), crc32
        if b"\n" in content[size:]:
            number = content[:size].count(b"\n") + 1
            self.faults = (f"{path}: damaged from line {number} on; the documents of these lines are encoded again",)
        return size


def _checksum(values: Mapping[str, Any], before: int) -> int:
    return zlib.crc32(json.dumps(values).encode(), before)


def _parse(line: bytes, before: int) -> tuple[dict[str, Any] | None, int | None]:
    """Return the values of a complete line, else None, and its checksum, None where that is not in it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not line.endswith(b"\n"):
        return None, None
    found = values.pop("crc32", None)
    return values, found if found == _checksum(values, before) else None


def _point(values: object) -> ResumePoint | None:
    try:
        return _POINT.validate_python(values)
    except ValidationError:
        return None


def _require_same(path: Path, job: Mapping[str, JsonValue], found: Mapping[str, Any], is_valid: bool) -> None:
    """Require that the log is that of this job; raises UserError."""
    ways_out = "give another --output-prefix, or --restart to drop what it did"
    if differing := [name for name in job if found.get(name) != job[name]]:
        raise UserError(
            f"{path}: an unfinished job with another {', another '.join(differing)} is here; repeat its command, "
            f"{ways_out}"
        )
    if not is_valid:
        raise UserError(
            f"{path}: its first line has no valid checksum: it is damaged, or of an older version, which resumes it; "
            f"{ways_out}"
        )
