"""Watchdog: a run with several ranks never hangs forever, and its last message names the rank at fault.

The watchdog thread of each rank publishes a heartbeat twice a second in a store that all ranks can read: iteration,
stack of the main thread, last collective.  A rank that makes no progress for too long, or loses a connection, compares
the heartbeats of all ranks:

    1. a heartbeat that is not renewed        that rank is dead or stopped, or its machine is gone
    2. else, a rank outside any collective    it keeps the others waiting
    3. else, the rank with fewest collectives

Then all ranks end, also where the store does not answer since the process that keeps it is stopped: only one thread
calls the store, and others watch for progress and end the process.  The main thread is sampled from outside
(`sys._current_frames`), so the watchdog costs the training loop nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from megatron3d.errors import UserError
from megatron3d.runtime.status_store import StatusStore

PACKAGE = Path(__file__).parents[1]
COLLECTIVES_FILE = "comm/process_comm.py"
"""Where a rank is whose main thread waits in a collective."""
REPORTER, REPORTED = "reporter", "reported"
MAX_FRAMES = 4
# Intervals between heartbeats within which the ranks report, or end without a report.
REPORT_INTERVALS = 20
# Name of a collective and its mesh axes.
Collective = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Heartbeat:
    """Status that a rank publishes.

    Attributes:
        sequence: number of this heartbeat; one that does not grow is of a dead rank.
        pid: process id.
        num_collectives: collectives started so far.
        last_collective: name, axes and number of the last one, empty before the first.
        stack: innermost frames of this package in the main thread, outermost first.
        idle_s: seconds since iteration, collectives or stack changed.
    """

    sequence: int
    host: str
    pid: int
    iteration: int | None
    num_collectives: int
    last_collective: str
    stack: tuple[str, ...]
    idle_s: float

    @property
    def in_collective(self) -> bool:
        """Whether the rank waits in a collective."""
        return bool(self.stack) and self.stack[-1].startswith(COLLECTIVES_FILE)

    @property
    def location(self) -> str:
        """Iteration, stack and last collective in words."""
        when = "before the first iteration" if self.iteration is None else f"after iteration {self.iteration}"
        last = f"last collective {self.last_collective}" if self.last_collective else "no collective yet"
        return f"{when}, in {' > '.join(self.stack) or 'no frame of megatron3d'}; {last}"

    def __str__(self) -> str:
        return f"{self.location}; for {self.idle_s:.0f} s"

    @staticmethod
    def from_json(text: str) -> Heartbeat:
        """Return the heartbeat that was written as `json.dumps(asdict(heartbeat))`."""
        values = json.loads(text)
        return Heartbeat(**{**values, "stack": tuple(values["stack"])})


def package_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the innermost `MAX_FRAMES` frames of this package at and below `frame`, each as `file:line function`."""
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path != Path(__file__):
            found.append(f"{path.relative_to(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


def diagnose(before: Mapping[int, Heartbeat | None], after: Mapping[int, Heartbeat | None]) -> Iterator[str]:
    """Compare two readings of all ranks' heartbeats: a line for each rank at fault, then where the others are."""
    silent = [rank for rank, beat in after.items() if beat is None or beat == before[rank]]
    alive = {rank: beat for rank, beat in after.items() if rank not in silent and beat is not None}
    computing = [rank for rank, beat in alive.items() if not beat.in_collective]
    if silent:
        at_fault, problem = silent, "does not answer"
    elif computing and len(computing) < len(alive):
        at_fault, problem = computing, "keeps the others waiting"
    else:
        progress = {rank: (beat.iteration or 0, beat.num_collectives) for rank, beat in alive.items()}
        at_fault = [rank for rank, done in progress.items() if done == min(progress.values())]
        problem = "has done the least" if len(at_fault) < len(alive) else "waits, as all do"
    for rank in at_fault:
        beat = after[rank]
        details = "and never sent a heartbeat" if beat is None else f"(host {beat.host}, process {beat.pid}): {beat}"
        yield f"rank {rank} {problem} {details}"
    yield from _grouped_by_location({rank: beat for rank, beat in alive.items() if rank not in at_fault})


def _grouped_by_location(heartbeats: Mapping[int, Heartbeat]) -> Iterator[str]:
    """Yield one line for all ranks at the same location."""
    locations: dict[str, list[int]] = {}
    for rank, beat in heartbeats.items():
        locations.setdefault(beat.location, []).append(rank)
    for location, ranks in locations.items():
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        yield f"rank{'s' * (len(ranks) > 1)} {shown}: {location}"


class Watchdog:
    """Publish this rank's heartbeats while entered, and end the process after `timeout_s` without progress.

    Args:
        end_process: leaves the process immediately.
    """

    def __init__(
        self, store: StatusStore, rank: int, world_size: int, timeout_s: float, end_process: Callable[[], None]
    ) -> None:
        self._store, self._rank = store, rank
        self._world_size, self._timeout_s = world_size, timeout_s
        self._end_process = end_process
        self._interval_s = max(0.5, world_size / 500)
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._progress_s = time.monotonic()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watch, self._publish)]
        self._iteration: Callable[[], int | None] = lambda: None
        self._collectives: Callable[[], tuple[int, Collective]] = lambda: (0, ("", ()))

    def follow(self, iteration: Callable[[], int], collectives: Callable[[], tuple[int, Collective]]) -> None:
        """Include in each heartbeat from now on the iterations done, the collectives started, and the last of them."""
        self._iteration, self._collectives = iteration, collectives

    def __enter__(self) -> Watchdog:
        self._progress_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report which rank was lost if a collective failed; the heartbeats continue meanwhile."""
        is_crash = isinstance(error, Exception) and not isinstance(error, UserError)
        if is_crash and _innermost_file(trace) == COLLECTIVES_FILE:
            self._report(f"rank {self._rank} lost a connection")
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * self._interval_s + 10)  # a thread inside the store would abort the ending process

    def _heartbeat(self, sequence: int) -> Heartbeat:
        count, (name, axes) = self._collectives()
        last = f"{name} over {' x '.join(axes)}, the {count}th" if count else ""
        stack = package_stack(sys._current_frames().get(self._main))
        idle_s = time.monotonic() - self._progress_s
        return Heartbeat(sequence, socket.gethostname(), os.getpid(), self._iteration(), count, last, stack, idle_s)

    def _publish(self) -> None:
        """Publish this rank's heartbeats until stopped."""
        sequence = 0
        while not self._stop.wait(self._interval_s if sequence else 0):
            sequence += 1
            with contextlib.suppress(OSError):  # the store's process has ended: its connections are reported elsewhere
                self._store.set(str(self._rank), json.dumps(asdict(self._heartbeat(sequence))))

    def _watch(self) -> None:
        """Give up where this rank makes no progress, until stopped."""
        last_state = None
        while not self._stop.wait(self._interval_s):
            beat = self._heartbeat(0)
            if (state := (beat.iteration, beat.num_collectives, beat.stack)) != last_state:
                last_state, self._progress_s = state, time.monotonic()
            if time.monotonic() - self._progress_s > self._timeout_s:
                self._give_up()
                return

    def _give_up(self) -> None:
        """Report, and end the process whatever becomes of the report; the heartbeats continue meanwhile."""
        threading.Thread(target=self._end_later, daemon=True).start()
        self._report(f"no progress for {self._timeout_s:.0f} s")
        self._end_process()

    def _end_later(self) -> None:
        time.sleep(2 * REPORT_INTERVALS * self._interval_s)
        self._end_process()

    def _report(self, reason: str) -> None:
        """Diagnose as long as the store answers, else name the process that keeps it."""
        reporter = threading.Thread(target=self._diagnose, args=(reason,), daemon=True)
        reporter.start()
        reporter.join(REPORT_INTERVALS * self._interval_s)
        if reporter.is_alive():
            self._blame_store(reason, "does not answer: it is stopped, or its machine is gone")

    def _diagnose(self, reason: str) -> None:
        """Diagnose and print on the first rank that gets here; the others wait until it has printed."""
        try:
            if self._store.claim(REPORTER):
                lines = [reason, *diagnose(*self._two_readings())]
                print("\n".join(f"> watchdog: {line}" for line in lines), file=sys.stderr, flush=True)
                self._store.set(REPORTED, "yes")
                time.sleep(self._interval_s)  # the store ends with rank 0
                return
            end_s = time.monotonic() + 10 * self._interval_s
            while self._store.get(REPORTED) is None and time.monotonic() < end_s:
                time.sleep(0.1)
        except OSError as error:
            self._blame_store(reason, f"cannot be reached ({error})")

    def _blame_store(self, reason: str, problem: str) -> None:
        keeper = "rank 0's process, which keeps the heartbeats,"
        print(f"> watchdog: rank {self._rank}: {reason}, and {keeper} {problem}", file=sys.stderr, flush=True)

    def _two_readings(self) -> Sequence[Mapping[int, Heartbeat | None]]:
        first = self._reading()
        time.sleep(3 * self._interval_s)
        return first, self._reading()

    def _reading(self) -> dict[int, Heartbeat | None]:
        texts = {rank: self._store.get(str(rank)) for rank in range(self._world_size)}
        return {rank: Heartbeat.from_json(text) if text else None for rank, text in texts.items()}


def _innermost_file(trace: TracebackType | None) -> str | None:
    """Return the innermost file of this package that an exception came through."""
    found: str | None = None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        found = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else found
        trace = trace.tb_next
    return found
