"""Ctrl-C before and after a program's own work: imported first by every program, since imports take seconds.

Between, it raises KeyboardInterrupt as usual.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1]


def leave(number: int, _: FrameType | None = None) -> None:
    """End the process, as on signal `number`; it has not done anything yet."""
    with contextlib.suppress(OSError):
        os.write(2, f"{Path(sys.argv[0]).name}: stopped; nothing was written\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In a program's process, let Ctrl-C interrupt the body, and ignore it once the exit code is known."""
    if signal.getsignal(signal.SIGINT) is not leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class CtrlC:
    """While entered, Ctrl-C sets `is_pressed` and interrupts nothing, but inside `interrupting`."""

    def __init__(self) -> None:
        self.is_pressed = False
        self._previous: Any = signal.SIG_DFL

    def __enter__(self) -> CtrlC:
        self._previous = signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _record(self, _: int, __: FrameType | None) -> None:
        self.is_pressed = True

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt in the body, as it does where nothing is to be finished."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._record)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Inside `interrupting`, let the body end before Ctrl-C raises KeyboardInterrupt."""
        self.is_pressed = False
        signal.signal(signal.SIGINT, self._record)
        yield
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.is_pressed:
            raise KeyboardInterrupt


@contextlib.contextmanager
def calling_every(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call a function in this thread every `seconds`, also while the body waits for input."""
    previous = signal.signal(signal.SIGALRM, lambda *_: function())
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _is_program() -> bool:
    """Return whether this process runs a program of this repository, not another that imports one, such as a test."""
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
    return path.parent in (PACKAGE.parent, PACKAGE.parent / "tools") or path.is_relative_to(PACKAGE)


def prepare() -> None:
    """Let Ctrl-C end a program with one line until its own work begins."""
    if _is_program() and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


prepare()
