"""Child processes that get signals as those of a shell in a terminal do, however the tests themselves were started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore after the body what this process does on signals that stop a program."""
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program with text pipes; signals that this process ignores, as under nohup, are not ignored there."""
    with kept_handlers():
        for number in STOPS:
            if signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        return subprocess.Popen(command, text=True, **options)
