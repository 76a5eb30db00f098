"""A file appears under its final name only when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron3d.errors import UserError

PARTIAL = ".partial"


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` with `suffix` appended; dots inside the prefix are kept."""
    return prefix.with_name(prefix.name + suffix)


def open_for_writing(path: Path) -> BinaryIO:
    """`path`, new and empty, its folder made if needed; raises UserError where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w+b")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a folder that you may write to") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends well, and is deleted when it does not."""
    partial = with_suffix(path, PARTIAL)
    file = open_for_writing(partial)
    try:
        with file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
