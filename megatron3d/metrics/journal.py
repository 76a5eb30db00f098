"""metrics.jsonl: one JSON object per launch, logged step, evaluation and event; floats at full precision, NaN as NaN.

No iteration is logged twice: a run that continues from iteration n first drops the lines after n, which will be written
again.  A line with `start` has the metadata of the launch that started after that iteration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from megatron3d.errors import UserError
from megatron3d.metrics.rows import AnyRow, JournalRow
from megatron3d.runtime.files import write_text

T = TypeVar("T")
FILE_NAME = "metrics.jsonl"
ANY_ROW, JOURNAL_ROW = TypeAdapter[Any](AnyRow), TypeAdapter[Any](JournalRow)


class Journal:
    """Open metrics.jsonl of a run that continues after `start_iteration` iterations; 0 empties it."""

    def __init__(self, folder: Path, start_iteration: int) -> None:
        self._path = folder / FILE_NAME
        self._file = self._open(start_iteration)

    def _open(self, last: int) -> TextIO:
        """Open the file after dropping the lines after iteration `last`."""
        path = self._path
        kept = [line for line, row in read_lines(path, ANY_ROW) if row["iteration"] <= last and last > 0]
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
    if not path.exists():
        raise UserError(f"{path}: there is no such file; give the folder of a run, its checkpoint.save")
    return [from_json(line) for line, _ in read_lines(path, JOURNAL_ROW)]


def read_lines(path: Path, form: TypeAdapter[T]) -> list[tuple[str, T]]:
    """Return the lines of a file of JSON objects, each with its content in a form; none without a file.

    A last line that is cut off is left out.  Raises UserError where the file cannot be read or has other contents.
    """
    try:
        if not path.exists():
            return []
        if not path.is_file():
            raise UserError(f"{path}: not a file; move it away")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [(line, _parse(path, number, line, form)) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: str, form: TypeAdapter[T]) -> T:
    try:
        return form.validate_python(from_json(line))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = f"not a record of a run ({'.'.join(map(str, fault['loc']))} {fault['msg']})"
    except ValueError as error:
        why = f"not JSON ({error})"
    raise UserError(f"{path}:{number}: {why}; move the file away or repair the line")
