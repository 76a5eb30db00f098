"""Waits for other ranks over gloo, which in an elastic run end when ranks are lost.

Where a connection ends, gloo tells whoever waits for data; a send that was partly written it forgets, and who waits for
that waits until the timeout of its group.  It can be told no more, so the wait is given up from outside: its thread
stays behind until the process ends.  So does the process group of a collective that has not ended, waited for or not:
its end would wait for that thread, and for all of this process, which then answers nobody.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

# Time between two looks whether ranks are lost.
POLL = timedelta(seconds=0.5)
# Limit for collectives to end once their connections have.
SETTLE_S = 1.0


class GlooWork(Protocol):
    """Operation of gloo in flight, as torch.distributed returns it."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class GivenUp(RuntimeError):
    """A wait was given up since ranks are lost."""


class LossWatch:
    """Says whether ranks are lost, and which collectives have not ended; there is one for all waits of a process.

    Attributes:
        is_lost: returns whether they are; None outside of elastic runs, where no wait is given up.
        has_given_up: whether a wait was, since the process groups were made.
    """

    def __init__(self) -> None:
        self.is_lost: Callable[[], bool] | None = None
        self.has_given_up = False
        self._in_flight: list[GlooWork] = []

    def start(self, work: GlooWork) -> None:
        """Note a collective that has begun."""
        if self.is_lost is not None:
            self._in_flight = [*self._unfinished(), work]

    def _unfinished(self) -> list[GlooWork]:
        return [each for each in self._in_flight if not each.is_completed()]

    def is_idle(self) -> bool:
        """Return whether all collectives have ended, after a moment in which those do that gloo tells."""
        end_s = time.monotonic() + SETTLE_S
        while self._unfinished() and time.monotonic() < end_s:
            time.sleep(0.01)
        return not (self.has_given_up or self._unfinished())

    def forget(self) -> None:
        """Forget the collectives of process groups that are gone."""
        self.has_given_up, self._in_flight = False, []

    def give_up_if_lost(self) -> None:
        """Raise GivenUp where ranks are lost."""
        if self.is_lost is not None and self.is_lost():
            self.has_given_up = True
            raise GivenUp("a wait for a rank was given up, since ranks are lost")


LOSSES = LossWatch()


def wait_for_collective(work: GlooWork) -> None:
    """Wait for a collective, or a barrier; raises GivenUp where ranks are lost."""
    if LOSSES.is_lost is None:
        work.wait()
        return
    while True:
        try:
            work.wait(POLL)
            return
        except RuntimeError:
            if work.is_completed():  # meanwhile, or with this error, which is raised again
                work.wait()
                return
        LOSSES.give_up_if_lost()


def wait_for_transfer(work: GlooWork) -> None:
    """Wait for a send or a receive, which ends its connection where a wait has a limit: a thread waits without one."""
    if LOSSES.is_lost is None:
        work.wait()
        return
    done, errors = threading.Event(), list[Exception]()

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
        done.set()

    threading.Thread(target=wait, name="transfer", daemon=True).start()
    while not done.wait(POLL.total_seconds()):
        LOSSES.give_up_if_lost()
    if errors:
        raise errors[0]


def keep_for_ever(groups: Iterable[Any]) -> None:
    """Keep process groups whose threads wait in vain: their end would wait for these, also that of the process."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
