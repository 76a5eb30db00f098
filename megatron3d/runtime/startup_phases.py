"""Phases of a program's start, timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StartupPhases:
    """Names and durations of the startup phases, each printed when it ends."""

    def __init__(self, printing: bool) -> None:
        self.durations: list[tuple[str, float]] = []
        self._printing = printing

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as the phase `name`."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.durations.append((name, seconds))
        if self._printing:
            print(f"> {name} ({seconds:.2f} s)", flush=True)

    @property
    def total_s(self) -> float:
        """Total seconds of all phases."""
        return sum(seconds for _, seconds in self.durations)
