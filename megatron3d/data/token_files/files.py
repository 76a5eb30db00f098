"""Output files of preprocessing: replaced when complete, or appended to and truncated to where they were sound.

What is being written is locked: of two processes that write the same file the second one is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron3d.errors import UserError
from megatron3d.runtime.files import open_locked, replace_file

PARTIAL = ".partial"
BLOCK_BYTES = 1 << 24


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Append `suffix` to `prefix`, whose dots are kept; raises UserError where the result is no file name."""
    if not prefix.name:
        raise UserError(f"{prefix}: no name of a file; use for example {prefix / 'corpus'}")
    if "/" in suffix or not is_path(f"{prefix}{suffix}"):
        raise UserError(f"{prefix}{suffix}: cannot be the name of a file; use another prefix, or another key")
    return prefix.with_name(prefix.name + suffix)


def is_path(text: str) -> bool:
    """Return whether a path can have these characters: no zero byte, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def lock_output(path: Path) -> io.FileIO:
    """Open `path` as it is, or new in a folder that is made if needed, and lock it until it is closed.

    Raises UserError where another process holds it, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_regular(path)
        file = open_locked(path)
    except BlockingIOError as error:
        raise UserError(f"{path}: another process is at work on this; wait for it, or give another name") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name a folder that you may write to, on a file system "
            "with flock"
        ) from error
    if has_name(file, path):
        return file
    file.close()  # the other process renamed it between opening and locking
    raise UserError(f"{path}: another process was at work on this; start again, or give another name")


def require_regular(path: Path) -> None:
    """Raise OSError where a folder, pipe or device has the name of a file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")


def has_name(file: io.FileIO, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def user_errors(path: Path | str) -> Iterator[None]:
    """Turn a failure to write, such as a full disk, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room and repeat the command, or name another folder"
        ) from error


@contextlib.contextmanager
def replace_output(path: Path) -> Iterator[BinaryIO]:
    """Open a locked file that replaces `path` when the block succeeds, and is deleted when it raises."""
    partial = with_suffix(path, PARTIAL)
    with lock_output(partial), user_errors(path), replace_file(path, partial) as file:
        yield file


class AppendOnlyFile:
    """Locked file that grows from `size` bytes on; bytes of an interrupted run after these are truncated."""

    def __init__(self, path: Path, size: int | None = 0) -> None:
        self.path, self._file = path, lock_output(path)
        if size is not None:
            self.truncate(size)

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, and append after them."""
        held = os.fstat(self._file.fileno()).st_size
        assert held >= size, f"{self.path} is shorter than the {size} bytes to go on from"
        with user_errors(self.path):
            self._file.truncate(size)
            self._file.seek(size)

    def append(self, data: bytes) -> None:
        """Write all of `data`; raises UserError where the disk is full."""
        with user_errors(self.path):
            rest = memoryview(data)
            while rest:  # one system call may write only a part
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Flush the appended bytes to disk (fsync)."""
        with user_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close; may be called twice."""
        self._file.close()

    def discard(self) -> None:
        """Close, and delete the file unless it has been renamed."""
        if not self._file.closed and has_name(self._file, self.path):
            self.path.unlink()
        self.close()


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def sha256(blocks: Iterable[bytes]) -> str:
    """Return the sha256 of a file's blocks, as sha256sum prints it."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
