"""Files and folders that appear whole or not at all, and locks that end with the process that holds them.

    write a temporary file -> fsync -> rename it to the final name -> fsync the folder

Locks are filelock's `lock_descriptor` and not its `FileLock`, which locks a file of its own: here the locked file is
the one that is written, and renamed while it is locked.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from filelock import lock_descriptor

from megatron3d.errors import is_machine_fault, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


T = TypeVar("T")
# Seconds between attempts at a file that a machine's fault keeps from being read.
WAITS_S = (0.5, 1.0, 2.0, 4.0)


def retried(path: Path, action: Callable[[], T]) -> T:
    """Return what an action on a file returns, tried again after faults of the machine, each of which is reported.

    Raises OSError with the name of the file where the last attempt fails as well, and other errors at once.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return action()
        except OSError as error:
            if not is_machine_fault(error):
                raise
            what = error.strerror or str(error)
            if wait_s is None:
                tried = f"{what}, in {len(WAITS_S) + 1} attempts"
                raise OSError(error.errno or errno.EIO, tried, str(path)) from error
            print(one_line(f"> {path}: {what}; trying again in {wait_s:g} s"), file=sys.stderr, flush=True)
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def fsync(path: Path) -> None:
    """Flush a file's contents, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content; nothing where there is none.  Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def absent(paths: Iterable[Path]) -> list[Path]:
    """Return those of the paths, and of the folders above them, that are not there, the deepest first."""
    whole = {place for path in paths for place in (path.absolute(), *path.absolute().parents)}
    return sorted((place for place in whole if not place.exists()), key=lambda place: -len(place.parts))


def hidden(path: Path) -> Path:
    """Return the temporary name of a file or folder: next to it, with a leading dot and `.tmp` at the end."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def replace_file(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds, and is deleted when the block raises.

    The folder of `path` must exist.  `temporary` defaults to `hidden(path)`.  A device or a pipe is not replaced but
    written to.  Raises OSError.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            yield device
        return
    temporary = temporary or hidden(path)
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # of a write
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and durably; its folder must exist.  Raises OSError."""
    with replace_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically and durably; its folder must exist.  Raises OSError."""
    write_bytes(path, text.encode())


def write_figure(path: Path, figure: Figure, dpi: int | None = None) -> None:
    """Write a figure atomically in the format of the file's suffix, png without one.

    Raises OSError, or ValueError for an unknown format.
    """
    with replace_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=dpi or "figure")


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a complete temporary folder to its final name, which must be free, durably.  Raises OSError."""
    fsync(temporary)
    temporary.rename(folder)
    fsync(folder.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder that is renamed to `folder` when the block succeeds, and removed when it raises.

    What an earlier, killed attempt left is removed first.  Raises OSError.
    """
    temporary = hidden(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove(temporary)
    temporary.mkdir()
    try:
        yield temporary
        publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_locked(path: Path) -> io.FileIO:
    """Open `path` for reading and writing, created if absent, and lock it until it is closed or this process ends.

    The lock holds between machines as far as the file system's flock does (NFS, Lustre with -o flock, GPFS, local
    disks).  Raises BlockingIOError where another process holds it, and OSError where it cannot be opened or locked.
    """
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not lock_descriptor(file.fileno(), blocking=False):
            raise BlockingIOError(errno.EAGAIN, "locked by another process", str(path))
    except OSError:
        file.close()
        raise
    return file
