"""A file appears under its final name only when it is complete; one that grows is cut back to where it was sound."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron3d.errors import UserError

PARTIAL = ".partial"
BLOCK_BYTES = 1 << 24


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
def writing(path: Path | str) -> Iterator[None]:
    """Turns a failure to write, such as a full disk, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room, or name another folder, and start again"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends well, and is deleted when it does not."""
    partial = with_suffix(path, PARTIAL)
    file = open_for_writing(partial)
    try:
        with writing(path):
            with file:
                yield file
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class GrowingFile:
    """A file that is only appended to, from `size` bytes on: what an interrupted run left behind that is cut off."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self.size = path, size
        if size == 0:
            open_for_writing(path).close()
        with writing(path):
            self._file = path.open("r+b", buffering=0)
            self._file.truncate(size)
            self._file.seek(size)

    def append(self, data: bytes) -> None:
        """Write all of it; raises UserError where there is no room."""
        with writing(self.path):
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        self.size += len(data)

    def sync(self) -> None:
        """Make what was appended survive a crash of the machine."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close; may be called twice."""
        self._file.close()


def blocks(path: Path) -> Iterator[bytes]:
    """All bytes of a file, some at a time."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def checksum(path: Path) -> str:
    """sha256 of a file, as sha256sum prints it."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()
