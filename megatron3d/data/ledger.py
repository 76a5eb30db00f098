"""The ledger of a job: a line of JSON for what the job is, then one for each point from which it can go on.

Data is written before the line that counts it; after a kill at any moment everything behind the last whole line is cut
off and done again.  The ledger is locked while a process works on it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron3d.data.files import open_for_writing, writing
from megatron3d.data.writer import Written
from megatron3d.errors import UserError


@dataclass(frozen=True)
class Entry:
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
    written: tuple[Written, ...] = ()


class Ledger:
    """Opens or begins the ledger of a job.

    Raises:
        UserError: it is of another job, another process works on it, or it cannot be written.
    """

    def __init__(self, path: Path, job: Mapping[str, JsonValue], restart: bool = False) -> None:
        self.path = path
        if not path.exists():
            open_for_writing(path).close()
        with writing(path):
            self._file = path.open("r+b", buffering=0)
        self._lock()
        lines = [] if restart else list(_whole_lines(self._file.read()))
        self.entries = [_entry(line) for line in lines[1:]]
        if lines:
            self._require_same(lines[0], job)
        size = sum(len(json.dumps(line)) + 1 for line in lines)
        with writing(path):
            self._file.truncate(size)
            self._file.seek(size)
        if not lines:
            self._append(dict(job))

    def write(self, entry: Entry) -> None:
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
            self._file.write((json.dumps(values) + "\n").encode())
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UserError(
                f"{self.path}: another process is at work on this; wait for it, or give another --output-prefix"
            ) from error

    def _require_same(self, found: Mapping[str, Any], job: Mapping[str, JsonValue]) -> None:
        differing = [name for name in job if found.get(name) != job[name]]
        if differing:
            self.close()
            raise UserError(
                f"{self.path}: an unfinished job with another {', another '.join(differing)} is here; repeat its "
                "command, give another --output-prefix, or --restart to drop what it did"
            )


def _whole_lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(values, dict):
            return
        yield values


def _entry(values: Mapping[str, Any]) -> Entry:
    written = tuple(Written(**counts) for counts in values["written"])
    return Entry(**{**values, "written": written})
