"""One run at a time saves to a folder: a lock that the operating system takes back when its owner ends, however."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.files import open_locked

FILE_NAME = ".lock"


class FolderLock:
    """Held from construction until `release`, or until this process ends; raises UserError where another holds it."""

    def __init__(self, root: Path) -> None:
        path = root / FILE_NAME
        try:
            self._file = open_locked(path)
        except BlockingIOError:
            owner = path.read_text()[:200].strip() or "another process"
            raise UserError(
                f"checkpoint.save={root}: {owner} is saving to this folder; wait for it, end it, or save elsewhere"
            ) from None
        except OSError as error:
            raise UserError(
                f"checkpoint.save={root}: {path.name} cannot be locked ({error.strerror}); save to a folder that you "
                "own, on a file system with flock"
            ) from error
        self._write(f"process {os.getpid()} on {socket.gethostname()}")

    def _write(self, text: str) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(text.encode())

    def release(self) -> None:
        """Let others save here."""
        if not self._file.closed:
            self._write("")
            self._file.close()
