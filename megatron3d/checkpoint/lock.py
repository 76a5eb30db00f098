"""Lock of a save folder, so that one run at a time saves to it; the operating system frees it when the process ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from megatron3d.errors import UserError
from megatron3d.runtime.files import open_locked

FILE_NAME = ".lock"


class FolderLock:
    """Lock held from construction until `release` or the end of the process; raises UserError where it is taken."""

    def __init__(self, root: Path) -> None:
        path = root / FILE_NAME
        try:
            self._file = open_locked(path)
        except BlockingIOError:
            with path.open("rb") as file:
                owner = file.read(200).decode(errors="backslashreplace").strip() or "another process"
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
        """Release the lock."""
        if not self._file.closed:
            self._write("")
            self._file.close()
