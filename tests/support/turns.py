"""Turns of ranks that are threads of one process: one rank runs at a time, until it waits for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Abandoned(Exception):
    """Raised in ranks that wait when another rank has failed."""


class _Wait(NamedTuple):
    what: str
    is_over: Callable[[], bool]


class Turns:
    """Passes the turn from rank to rank; a rank that waits gives it to the next one that can go on."""

    def __init__(self, num_ranks: int) -> None:
        self._wakes = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits = {rank: _Wait("start", lambda: True) for rank in range(num_ranks)}
        self.failure: BaseException | None = None

    def start(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._wakes[rank].acquire()

    def wait(self, rank: int, what: str, is_over: Callable[[], bool]) -> None:
        """Return once `is_over()`, which another rank brings about.

        Raises Abandoned where that cannot happen any more.
        """
        if is_over():
            return
        self._waits[rank] = _Wait(what, is_over)
        self.give(rank)
        self._wakes[rank].acquire()
        if self.failure:
            raise Abandoned(what)

    def give(self, rank: int) -> None:
        """Give the turn to the next rank after `rank` that can go on; where all wait, all fail."""
        num_ranks = len(self._wakes)
        for other in ((rank + 1 + step) % num_ranks for step in range(num_ranks)):
            if other in self._waits and self._waits[other].is_over():
                del self._waits[other]
                self._wakes[other].release()
                return
        if self._waits:
            waits = "; ".join(f"rank {rank} waits for {wait.what}" for rank, wait in sorted(self._waits.items()))
            self.fail(AssertionError(f"deadlock: {waits}"))

    def fail(self, error: BaseException) -> None:
        """End all ranks that wait."""
        self.failure = self.failure or error
        waits, self._waits = self._waits, {}
        for rank in waits:
            self._wakes[rank].release()
