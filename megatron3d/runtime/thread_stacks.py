"""Where each thread of this process is in this package, read without disturbing it.

`sys._current_frames` gives frame objects that their threads go on with, and free, while another thread reads them: a
training process has crashed there, in `f_back` of CPython 3.11.  faulthandler writes the stacks of all threads in one
call, during which none runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import tempfile
from pathlib import Path
from typing import BinaryIO

PACKAGE = Path(__file__).parents[1]
MAX_FRAMES = 4
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line ([0-9]+) in (.*)')


def package_stacks(apart_from: str = "") -> dict[int, tuple[str, ...]]:
    """Return the innermost `MAX_FRAMES` frames of this package in each thread, each as `file:line function`.

    The keys are the threads' `ident`; without memory or descriptors for the text there are none.

    Args:
        apart_from: a file whose frames do not count, nor do those of this one.
    """
    inside, ours = _as_written(f"{PACKAGE}{os.sep}"), {_as_written(__file__), _as_written(apart_from)}
    found: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in _text().splitlines():
        if thread := _THREAD.match(line):
            frames = found.setdefault(int(thread[1], 16), [])
        elif len(frames) < MAX_FRAMES and (frame := _FRAME.fullmatch(line)):
            file, number, function = frame.groups()
            if file.startswith(inside) and file not in ours:
                frames.append(f"{file.removeprefix(inside)}:{number} {function}")
    return {ident: tuple(reversed(frames)) for ident, frames in found.items()}


def _as_written(path: str) -> str:
    """Return a path as faulthandler writes it, in ASCII."""
    return path.encode("ascii", "backslashreplace").decode()


def _text() -> str:
    """Return faulthandler's text: threads, and the frames of each from the innermost."""
    with contextlib.suppress(OSError), _file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("ascii", "replace")
    return ""


def _file() -> BinaryIO:
    """Return a file in memory where the system has them; a full disk does not matter then."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
