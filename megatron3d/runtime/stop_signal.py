"""Signals that ask a run to save and end."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


class StopSignal:
    """While entered, SIGINT, SIGTERM, SIGUSR1 and SIGHUP request a stop, not the end; a second SIGINT interrupts.

    One Ctrl-C may arrive twice, from the terminal and from torchrun: a repetition counts only after `REPEAT_S` seconds.
    After a request the process only ends, and further signals (batch systems repeat them) do not change its exit code.
    """

    REPEAT_S = 1.0

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        watched = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            watched.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._record) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if self.requested is None:
                signal.signal(number, handler)
            elif number != signal.SIGINT:  # Python restores its own handlers before the process has ended
                signal.signal(number, signal.SIG_IGN)

    def _record(self, number: int, _: FrameType | None) -> None:
        repeated = self.requested is not None and time.monotonic() - self._since_s > self.REPEAT_S
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._since_s = time.monotonic()
