"""A file appears under its final name only when it is complete; one that grows is cut back to where it was sound.

What is being written is locked: of two processes that want to write the same file the second one is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron3d.errors import UserError
from megatron3d.runtime.files import open_locked, replace_file

PARTIAL = ".partial"
BLOCK_BYTES = 1 << 24


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` with `suffix` appended; dots inside the prefix are kept.  Raises UserError where it has no name."""
    if not prefix.name:
        raise UserError(f"{prefix}: no name of a file; use such as {prefix / 'corpus'}")
    return prefix.with_name(prefix.name + suffix)


def hold(path: Path) -> io.FileIO:
    """`path` as it is, or new, its folder made if needed: of this process alone until it is closed.

    Raises UserError where another process holds it, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_locked(path)
    except BlockingIOError as error:
        raise UserError(f"{path}: another process is at work on this; wait for it, or give another name") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name a folder that you may write to, on a file system "
            "with flock"
        ) from error
    if is_named(file, path):
        return file
    file.close()  # the other process renamed it between opening and locking
    raise UserError(f"{path}: another process was at work on this; start again, or give another name")


def is_named(file: io.FileIO, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns a failure to write, such as a full disk, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room, or name another folder, and start again"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends well, and is deleted when it does not."""
    partial = with_suffix(path, PARTIAL)
    with hold(partial), writing(path), replace_file(path, partial) as file:
        yield file


class AppendOnlyFile:
    """A file that is only appended to, from `size` bytes on: what an interrupted run left behind that is cut off."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path, self._file = path, hold(path)
        assert os.fstat(self._file.fileno()).st_size >= size, f"{path} is shorter than the {size} bytes to go on from"
        cut(self._file, size)

    def append(self, data: bytes) -> None:
        """Write all of it; raises UserError where there is no room."""
        with writing(self.path):
            write_all(self._file, data)

    def sync(self) -> None:
        """Make what was appended survive a crash of the machine."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close; may be called twice."""
        self._file.close()

    def discard(self) -> None:
        """Close, and delete unless it has another name by now."""
        if not self._file.closed and is_named(self._file, self.path):
            self.path.unlink()
        self.close()


def cut(file: io.FileIO, size: int) -> None:
    """Make a file shorter, and go to its end."""
    file.truncate(size)
    file.seek(size)


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of it, of which the system may take a part at one time; raises OSError where there is no room."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


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
