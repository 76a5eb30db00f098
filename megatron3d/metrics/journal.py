"""metrics.jsonl: one JSON object per launch, logged step, evaluation and event; floats at full precision, NaN as NaN.

No iteration is logged twice: a run that continues from iteration n first drops the lines after n, which will be written
again.  A line with `start` has the metadata of the launch that started after that iteration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron3d.errors import UserError
from megatron3d.runtime.files import write_text

FILE_NAME = "metrics.jsonl"


class Journal:
    """Open metrics.jsonl of a run that continues after `start_iteration` iterations; 0 empties it."""

    def __init__(self, folder: Path, start_iteration: int) -> None:
        self._path = folder / FILE_NAME
        self._file = self._open(start_iteration)

    def _open(self, last: int) -> TextIO:
        """Open the file after dropping the lines after iteration `last`."""
        path = self._path
        kept = [line for line, row in _rows(path) if row["iteration"] <= last and last > 0]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(kept))
            return path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another checkpoint.save") from error

    def drop_after(self, iteration: int) -> None:
        """Drop the lines after an iteration."""
        self.close()
        self._file = self._open(iteration)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write and flush one line; raises OSError with the file's name."""
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line that is cut off.

    Raises:
        UserError: the file is missing or has other contents.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give the folder of a run, its checkpoint.save")
    return [row for _, row in _rows(path)]


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines and their contents; none without a file."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [(line, _row(path, number, line)) for number, line in enumerate(lines, start=1)]


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not JSON ({error}); move the file away or repair the line") from error
    if not isinstance(row, dict) or type(row.get("iteration")) is not int or abs(row["iteration"]) >= 2**63:
        raise UserError(f"{path}:{number}: not a record of a run: it has no whole number `iteration`")
    return row
