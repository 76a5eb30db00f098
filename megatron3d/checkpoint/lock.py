"""One run at a time saves to a folder: a lock that the operating system takes back when its owner ends, however."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from megatron3d.errors import UserError

FILE_NAME = ".lock"


class FolderLock:
    """Held from construction until `release`, or until this process ends; raises UserError where another holds it.

    It holds between machines as far as the file system's flock does (NFS, Lustre with -o flock, GPFS, local disks).
    """

    def __init__(self, root: Path) -> None:
        path = root / FILE_NAME
        try:
            self._file = path.open("a+")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._read() or "another process"
            self._file.close()
            raise UserError(
                f"checkpoint.save={root}: {owner} is saving to this folder; wait for it, end it, or save elsewhere"
            ) from None
        except OSError as error:
            raise UserError(
                f"checkpoint.save={root}: {path.name} cannot be locked ({error.strerror}); save to a folder that you "
                "own, on a file system with flock"
            ) from error
        self._write(f"process {os.getpid()} on {socket.gethostname()}")

    def _read(self) -> str:
        self._file.seek(0)
        return self._file.read(200).strip()

    def _write(self, text: str) -> None:
        self._file.truncate(0)
        self._file.write(text)
        self._file.flush()

    def release(self) -> None:
        """Let others save here."""
        if not self._file.closed:
            self._write("")
            self._file.close()
