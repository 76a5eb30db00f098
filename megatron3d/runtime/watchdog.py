"""Watchdog: a run with several ranks never hangs forever, and its last message names the rank at fault.

The watchdog thread of each rank publishes a heartbeat twice a second in a store that all ranks can read: iteration,
collectives of each group, and once neither has changed for a while the stack of the main thread.  A rank that makes no
progress for too long, or loses a connection, writes what torch recorded of its collectives, and compares the heartbeats
of all ranks (`heartbeat.diagnose`).

Then all ranks end, also where the store does not answer since the process that keeps it is stopped: only one thread
calls the store, and others watch for progress and end the process.  The threads of a step are sampled from outside,
so the watchdog costs the training loop nothing.

Bytes that any rank writes of a checkpoint are progress of every rank: the others wait for it, some in a thread.  All
ranks add theirs to one count in the store.

Before that, each rank listens to the heartbeat of the next one, and says when it stops and when it comes back.

Stacks are read while their threads run, which takes care.  faulthandler walks the list of threads without CPython's
lock, and crashes where a C++ thread (of autograd, of gloo) adds itself: a run of two tensor-parallel ranks did after
20,000 reads.  `sys._current_frames` takes the lock, but `f_back` makes objects, and in CPython 3.11 a garbage
collection that this starts runs other threads, whose frames are freed meanwhile.  So the collector is off during a
read, and no thread asks for the interpreter for longer than a read takes; 460,000 reads per rank did no harm.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from megatron3d.errors import UserError
from megatron3d.runtime.culprits import add_culprits
from megatron3d.runtime.files import write_bytes
from megatron3d.runtime.heartbeat import (
    COLLECTIVES_FILES,
    CollectiveStatus,
    Heartbeat,
    StatusStore,
    culprits,
    diagnose,
)

PACKAGE = Path(__file__).parents[1]
MAX_FRAMES = 4
# While stacks are read, a thread that waits for the interpreter asks for it only after this time.
SWITCH_S = 0.1
_READING = threading.Lock()


def package_stacks(apart_from: str = "") -> dict[int, tuple[str, ...]]:
    """Return the innermost `MAX_FRAMES` frames of this package in each thread, each as `file:line function`.

    The keys are the threads' `ident`.

    Args:
        apart_from: a file whose frames do not count, nor do those of this one.
    """
    inside, ours = f"{PACKAGE}{os.sep}", (__file__, apart_from)
    with _other_threads_waiting():
        return {ident: _innermost(frame, inside, ours) for ident, frame in sys._current_frames().items()}


def _innermost(innermost: FrameType, inside: str, ours: Sequence[str]) -> tuple[str, ...]:
    """Return the frames of a stack whose file is `inside` and not one of `ours`, outermost first."""
    found: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < MAX_FRAMES:
        file = frame.f_code.co_filename
        if file.startswith(inside) and file not in ours:
            found.append(f"{file.removeprefix(inside)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


@contextlib.contextmanager
def _other_threads_waiting() -> Iterator[None]:
    """While entered, start no garbage collection and keep the interpreter, unless the body gives it up."""
    with _READING:
        interval_s, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(SWITCH_S)
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            sys.setswitchinterval(interval_s)


REPORTER, REPORTED, SAVED, LOSS = "reporter", "reported", "bytes saved", "loss"
# Intervals between heartbeats within which the ranks report, or end without a report.
REPORT_INTERVALS = 20
# Silence of a rank that is reported while the run goes on: a long call without a free interpreter is shorter.
SILENT_S = 20.0
# Silence after which ranks of an elastic run go on without the process, if its store does not answer either.
ABSENT_S = 8.0
LISTENED_INTERVALS = 10
# Time without an iteration or a collective, at most this part of the timeout, after which stacks are read.
SUSPECT_S, SUSPECT_PART = 60.0, 0.25
READINGS_PER_SUSPECT = 20
TRACES = "flight_recorder"


def program_stack(main: int) -> tuple[str, ...]:
    """Return the stack of the thread `main`, and below it that of the backward where that has a thread of its own.

    On GPUs autograd has a thread for each device, which Python did not start, while the main thread waits for it.
    """
    stacks = package_stacks(apart_from=__file__)
    ours = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    foreign = [stack for ident, stack in stacks.items() if ident not in ours]
    return stacks.get(main, ()) + max(foreign, key=len, default=())


class Suspicion:
    """Notice progress: of counters, and once they stand still for `limit_s` that of the stack, which is read only then.

    Attributes:
        stack: what `read` returned last; None while the counters are not known to stand still.
    """

    def __init__(self, limit_s: float, read: Callable[[], tuple[str, ...]]) -> None:
        self._limit_s, self._read = limit_s, read
        self._counters: object = None
        self._next_s = 0.0
        self.stack: tuple[str, ...] | None = None

    def is_progress(self, counters: object, now_s: float) -> bool:
        """Return whether the counters changed since the last call, or the stack since it was first read."""
        if counters != self._counters:
            self._counters, self.stack = counters, None
            self._next_s = now_s + self._limit_s
            return True
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._limit_s / READINGS_PER_SUSPECT
        before, self.stack = self.stack, self._read()
        return before is not None and before != self.stack


class Silence:
    """Notice that another rank's heartbeat is not renewed for `limit_s`, and that it is again.

    Attributes:
        is_silent: whether it is not renewed now.
    """

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._last: str | None = None
        self._since_s: float | None = None
        self.is_silent = False

    def hear(self, text: str | None, now_s: float) -> str | None:
        """Return a message if the heartbeat read at `now_s` ends or begins a silence."""
        since_s = now_s if self._since_s is None else self._since_s
        if text != self._last or self._since_s is None:
            was_silent, self.is_silent = self.is_silent, False
            self._last, self._since_s = text, now_s
            return f"rank {self._rank} answers again, after {now_s - since_s:.0f} s" if was_silent else None
        if self.is_silent or now_s - since_s < self._limit_s:
            return None
        self.is_silent = True
        beat = Heartbeat.from_json(text) if text else None
        last = f"{beat.process}; before that {beat.location}" if beat else "since it began"
        return f"rank {self._rank} has sent no heartbeat for {now_s - since_s:.0f} s {last}"


class Losses(NamedTuple):
    """What an elastic run does in place of ending when ranks are lost.

    Attributes:
        tell: is called with the reason, and the ranks that are known to be lost.
        state: returns what is wrong with the process of a rank, whose heartbeats may have stopped; None: nothing.
        keeper: returns what is wrong with the process that keeps the heartbeats, which does not take them; or None.
    """

    tell: Callable[[str, Sequence[int]], None]
    state: Callable[[int, bool], str | None]
    keeper: Callable[[], str | None]


class Watchdog:
    """Publish this rank's heartbeats while entered, and end the process after `timeout_s` without progress.

    Args:
        end_process: leaves the process immediately.
        trace: returns what torch recorded of the last collectives, for its tool `torchfrtrace`; empty for nothing.
        losses: of an elastic run, whose process does not end.
    """

    def __init__(
        self,
        store: StatusStore,
        rank: int,
        world_size: int,
        timeout_s: float,
        end_process: Callable[[], None],
        trace: Callable[[], bytes] = bytes,
        *,
        losses: Losses | None = None,
    ) -> None:
        self._losses = losses
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._end_process, self._trace = timeout_s, end_process, trace
        self._interval_s = max(0.5, world_size / 500)
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._progress_s = time.monotonic()
        self._suspicion = Suspicion(min(SUSPECT_S, SUSPECT_PART * timeout_s), lambda: program_stack(self._main))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watch, self._publish)]
        if losses is not None:
            self._threads.append(threading.Thread(target=self._find_losses, args=(losses,), daemon=True))
        self._next_rank = (rank + 1) % world_size
        self._silence = Silence(self._next_rank, max(SILENT_S, LISTENED_INTERVALS * self._interval_s))
        self._absence = Silence(self._next_rank, max(ABSENT_S, LISTENED_INTERVALS * self._interval_s))
        self._iteration: Callable[[], int | None] = lambda: None
        self._collectives: Callable[[], CollectiveStatus] = CollectiveStatus
        self._folder: Path | None = None
        self._bytes_saved: Callable[[], int] = lambda: 0
        self._saved_by_all = 0
        self._culprits: list[int] = []
        self._published_s = time.monotonic()

    def follow(
        self,
        iteration: Callable[[], int | None],
        collectives: Callable[[], CollectiveStatus],
        folder: Path | None = None,
    ) -> None:
        """Include the iterations done and the collectives of each group in each heartbeat from now on.

        Args:
            folder: the run's, for the traces of collectives.
        """
        self._iteration, self._collectives, self._folder = iteration, collectives, folder

    def follow_saves(self, bytes_saved: Callable[[], int]) -> None:
        """Take what this rank has written of checkpoints so far, and what others have, for progress from now on."""
        self._bytes_saved = bytes_saved

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
        if self._losses is not None:
            self._stop.set()
        elif is_crash and innermost_file(trace) in COLLECTIVES_FILES:
            self._save_trace()
            self._report(f"rank {self._rank} lost a connection")
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self._interval_s + 10)  # a thread inside the store would abort the ending process

    def _heartbeat(self, sequence: int) -> Heartbeat:
        done = self._collectives()
        last = f"{done.last}, the {done.num_started}th" if done.num_started else ""
        return Heartbeat(
            sequence,
            socket.gethostname(),
            os.getpid(),
            self._iteration(),
            done.num_started,
            last,
            self._suspicion.stack,
            time.monotonic() - self._progress_s,
            done.groups,
        )

    def _publish(self) -> None:
        """Publish this rank's heartbeats, and listen to the next rank's, until stopped."""
        sequence = told = 0
        while not self._stop.wait(self._interval_s if sequence else 0):
            sequence += 1
            with contextlib.suppress(OSError):  # the store's process has ended: its connections are reported elsewhere
                self._store.set(str(self._rank), json.dumps(asdict(self._heartbeat(sequence))))
                saved = self._bytes_saved()
                self._saved_by_all = self._store.count(SAVED, saved - told)
                told = saved
                beat = self._store.get(str(self._next_rank))
                if message := self._silence.hear(beat, time.monotonic()):
                    _print([message])
                self._absence.hear(beat, time.monotonic())
                if self._losses is not None and (loss := self._store.get(LOSS)) is not None:
                    self._losses.tell(loss, ())
                    return
                self._published_s = time.monotonic()
                continue
            if self._losses is not None and not self._stop.is_set():
                self._losses.tell("the store of the heartbeats cannot be reached", ())
                return

    def _find_losses(self, losses: Losses) -> None:
        """Look what the process of the next rank does, and that which keeps the heartbeats, until stopped."""
        while not self._stop.wait(self._interval_s):
            if (problem := losses.state(self._next_rank, self._absence.is_silent)) is not None:
                losses.tell(f"the process of rank {self._next_rank} {problem}", (self._next_rank,))
                return
            has_stalled = time.monotonic() - self._published_s > ABSENT_S
            if has_stalled and (problem := losses.keeper()) is not None:
                losses.tell(f"the process that keeps the heartbeats {problem}", ())
                return

    def tell_loss(self, reason: str) -> None:
        """Let the other ranks know that some are lost, as far as the store answers in time."""

        def tell() -> None:
            with contextlib.suppress(OSError):
                self._store.set(LOSS, reason)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(self._interval_s)

    def _watch(self) -> None:
        """Give up where this rank makes no progress, until stopped."""
        while not self._stop.wait(self._interval_s):
            counters = self._iteration(), self._collectives().num_started, self._bytes_saved(), self._saved_by_all
            if self._suspicion.is_progress(counters, time.monotonic()):
                self._progress_s = time.monotonic()
            if time.monotonic() - self._progress_s > self._timeout_s:
                self._give_up()
                return

    def _give_up(self) -> None:
        """Report, and end the process whatever becomes of the report; the heartbeats continue meanwhile."""
        if self._losses is not None:
            self._report(f"no progress for {self._timeout_s:.0f} s")
            self._losses.tell(f"no progress for {self._timeout_s:.0f} s", self._culprits)
            return
        threading.Thread(target=self._end_later, daemon=True).start()
        self._save_trace()
        self._report(f"no progress for {self._timeout_s:.0f} s")
        self._end_process()

    def _end_later(self) -> None:
        time.sleep(2 * REPORT_INTERVALS * self._interval_s)
        self._end_process()

    def _save_trace(self) -> None:
        """Write what torch recorded of the collectives to the run's folder, unless that takes long."""
        if self._folder is not None:
            writer = threading.Thread(target=self._write_trace, args=(self._folder / TRACES,), daemon=True)
            writer.start()
            writer.join(REPORT_INTERVALS * self._interval_s / 2)

    def _write_trace(self, folder: Path) -> None:
        try:
            if trace := self._trace():
                folder.mkdir(parents=True, exist_ok=True)
                write_bytes(folder / f"rank_{self._rank}", trace)
        except (OSError, RuntimeError) as error:
            _print([f"rank {self._rank}: the trace of its collectives is not written: {error}"])

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
                before = self._reading()
                time.sleep(3 * self._interval_s)
                after = self._reading()
                _print([reason, *diagnose(before, after), *self._traces()])
                self._culprits = culprits(before, after)
                self._write_culprits(self._culprits)
                self._store.set(REPORTED, json.dumps(self._culprits))
                time.sleep(self._interval_s)  # the store ends with rank 0
                return
            end_s = time.monotonic() + 10 * self._interval_s
            while (reported := self._store.get(REPORTED)) is None and time.monotonic() < end_s:
                time.sleep(0.1)
            self._culprits = json.loads(reported) if reported else []
        except OSError as error:
            self._blame_store(reason, f"cannot be reached ({error})")

    def _write_culprits(self, ranks: Sequence[int]) -> None:
        """Add the ranks at fault to the run's folder, for the choice of the next launch's nodes.

        Processes that go on without them have other ranks later, and need no launch.
        """
        if self._folder is not None and ranks and self._losses is None:
            writer = threading.Thread(target=add_culprits, args=(self._folder, ranks, self._world_size), daemon=True)
            writer.start()
            writer.join(self._interval_s)

    def _traces(self) -> Sequence[str]:
        """Return a line about the traces if this rank has written one."""
        if self._folder is None or not (self._folder / TRACES / f"rank_{self._rank}").exists():
            return ()
        return (f"the last collectives of each rank, for torchfrtrace: {self._folder / TRACES}",)

    def _blame_store(self, reason: str, problem: str) -> None:
        keeper = "rank 0's process, which keeps the heartbeats,"
        _print([f"rank {self._rank}: {reason}, and {keeper} {problem}"])

    def _reading(self) -> dict[int, Heartbeat | None]:
        texts = {rank: self._store.get(str(rank)) for rank in range(self._world_size)}
        return {rank: Heartbeat.from_json(text) if text else None for rank, text in texts.items()}


def _print(lines: Sequence[str]) -> None:
    print("\n".join(f"> watchdog: {line}" for line in lines), file=sys.stderr, flush=True)


def innermost_file(trace: TracebackType | None) -> str | None:
    """Return the innermost file of this package that an exception came through."""
    found: str | None = None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        found = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else found
        trace = trace.tb_next
    return found
