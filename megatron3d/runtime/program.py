"""Console, entry point and end of a program: escaped output, messages and exit codes in place of tracebacks.

Everything that is printed passes `ConsoleStream`.  It is ours since rich escapes only what rich prints: here what
other libraries print is escaped too, and a closed or full output is no traceback.
"""

from __future__ import annotations

from megatron3d.runtime.interrupt import interruptible

import argparse
import contextlib
import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from rich import progress
from rich.console import Console

from megatron3d.errors import ExitCode, RunFailed, UserError, escaped, is_machine_fault, one_line, shortened


class ConsoleStream:
    """Text stream that escapes harmful characters of what is written to another one.

    Args:
        is_optional: drop the output once nothing can be written, instead of raising OSError.
        is_for_messages: shorten overlong lines, and let a write begin with the carriage return of a progress bar.
    """

    def __init__(self, stream: TextIO, name: str, is_optional: bool = False, is_for_messages: bool = False) -> None:
        self.stream, self._name = stream, name
        self._is_optional, self._is_for_messages = is_optional, is_for_messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        """Return False: libraries must not write colours, which would be escaped."""
        return False

    def make_optional(self) -> None:
        """Drop the output from now on once nothing can be written."""
        self._is_optional = True

    def write(self, text: str) -> int:
        """Write escaped text; raises OSError unless the output is optional."""
        shown = escaped(text)
        if self._is_for_messages:
            shown = "\n".join(map(shortened, escaped(text.removeprefix("\r")).split("\n")))
            shown = "\r" * text.startswith("\r") + shown
        try:
            self.stream.write(shown)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write escaped texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush what was written; raises OSError unless the output is optional."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Discard what cannot be written, which would fail again when the process ends, and all that follows."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
        if not self._is_optional:
            raise OSError(error.errno, error.strerror, self._name) from error
        if sys.stderr is not cast(TextIO, self):
            message = f"> {self._name} cannot be written any more ({error.strerror}); the program goes on without it"
            print(message, file=sys.stderr, flush=True)


def protect() -> None:
    """Escape what this process prints from now on; does nothing where a caller has redirected the streams."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = cast(TextIO, ConsoleStream(_writable(sys.stdout), "standard output"))
    if sys.stderr is sys.__stderr__:
        errors = ConsoleStream(_writable(sys.stderr), "standard error", is_optional=True, is_for_messages=True)
        sys.stderr = cast(TextIO, errors)


def _writable(stream: TextIO | None) -> TextIO:
    """Return a stream that takes every character; what is written to a closed one (`>&-`, None) is discarded."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def outlive_readers() -> None:
    """Go on without the console when it is closed or full, as a run does that has its numbers in metrics.jsonl."""
    if isinstance(sys.stdout, ConsoleStream):
        sys.stdout.make_optional()


def flush(limit_s: float) -> None:
    """Flush both streams, unless that takes longer: nobody may read a pipe that is full."""

    def both() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(limit_s)


def below(stream: TextIO) -> TextIO:
    """Return the stream to which a console stream writes, for output that moves the cursor."""
    return stream.stream if isinstance(stream, ConsoleStream) else stream


@interruptible()
def exit_code_of(work: Callable[[], int], tell: Callable[[Sequence[str]], None], interrupted: str) -> int:
    """Run `work` and return its exit code: 2 for a UserError or a file that its user can mend, 1 for other OSErrors,
    130 for Ctrl-C, 141 for a lost reader.

    Args:
        tell: shows one message per problem.
        interrupted: message of Ctrl-C, unless the KeyboardInterrupt has arguments.

    Raises any other exception, also a lost connection or a timeout between ranks, which is nobody's input.
    """
    protect()
    try:
        return _flushed(work)
    except UserError as error:
        tell(error.problems)
    except RunFailed as error:
        tell([str(error)])
        return ExitCode.CRASH
    except BrokenPipeError:  # as in `| head`
        return ExitCode.BROKEN_PIPE
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        tell(UserError.of(error).problems)
        if is_machine_fault(error):
            return ExitCode.CRASH
    except KeyboardInterrupt as stop:
        tell([f"stopped; {' '.join(map(str, stop.args))}" if stop.args else interrupted])
        return ExitCode.INTERRUPTED
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return ExitCode.USER_ERROR


def _flushed(work: Callable[[], int]) -> int:
    """Return what `work` returns; raise OSError if what it printed cannot be written, also where it exits."""
    try:
        code = work()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def parse_first(parser: argparse.ArgumentParser) -> None:
    """Answer `--help` and refuse a wrong command line before a program imports libraries, which takes seconds.

    Programs call it between the imports of their parser and all others; their `main` parses again.
    """

    def parse() -> int:
        parser.parse_args()
        return ExitCode.DONE

    prepared = signal.getsignal(signal.SIGINT)
    if code := exit_code_of(parse, _tell_as(parser.prog), "stopped; nothing was written"):
        sys.exit(code)
    signal.signal(signal.SIGINT, prepared)


def run_tool(
    work: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """Run a tool and return its exit code: 0 done, 2 user error (a message per problem), 130 stopped by Ctrl-C.

    2 is also a file that cannot be read or written, 141 a closed output pipe.
    """

    def run() -> int:
        work(parser.parse_args(argv))
        return ExitCode.DONE

    return exit_code_of(run, _tell_as(parser.prog), "stopped; nothing was written")


def _tell_as(program: str) -> Callable[[Sequence[str]], None]:
    def tell(problems: Sequence[str]) -> None:
        for problem in problems:
            print(f"{program}: {problem}", file=sys.stderr)

    return tell


def byte_progress(*more: str) -> progress.Progress:
    """Return a bar of bytes with speed, time left and further columns; on standard error, drawn only on a terminal."""
    size = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
    return _progress(_description(), *size, *map(progress.TextColumn, more), progress.TimeRemainingColumn())


def spinner(description: str) -> progress.Progress:
    """Return a spinner with the time spent, for work of unknown length."""
    shown = _progress(progress.SpinnerColumn(), _description(), progress.TimeElapsedColumn())
    shown.add_task(one_line(description), total=None)
    return shown


def _description() -> progress.TextColumn:
    return progress.TextColumn("{task.description}", markup=False)


def _progress(*columns: progress.ProgressColumn) -> progress.Progress:
    # By default rich would write what is printed while a bar is drawn to the terminal itself, not escaped.
    console = Console(file=below(sys.stderr))
    return progress.Progress(*columns, redirect_stdout=False, redirect_stderr=False, console=console)


class StopSignal:
    """While entered, SIGINT, SIGTERM, SIGUSR1 and SIGHUP request a stop, not the end; a second SIGINT interrupts.

    One Ctrl-C may arrive twice, from the terminal and from torchrun: a repetition counts only after `REPEAT_S` seconds.
    After a request the process only ends, and further signals (batch systems repeat them) do not change its exit code.
    What started this process may have blocked them, which it would inherit: they are unblocked.

    Args:
        tells: say at once what a signal does, since a step may take long.
    """

    REPEAT_S = 1.0

    def __init__(self, tells: bool = False) -> None:
        self.requested: str | None = None
        self._tells = tells
        self._first = threading.Lock()
        self._since_s = math.inf
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        watched = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            watched.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._record) for number in watched}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return self

    def is_requested(self) -> bool:
        """Return whether a stop was requested; to be asked before each step, since it also takes the signals again.

        LLVM, by which Triton compiles, takes SIGUSR1 to itself for the first kernel of a process, and drops it.
        """
        if self.requested is None:
            for number in self._previous:
                signal.signal(number, self._record)
        return self.requested is not None

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if self.requested is None:
                signal.signal(number, handler)
            elif number != signal.SIGINT:  # Python restores its own handlers before the process has ended
                signal.signal(number, signal.SIG_IGN)

    def _record(self, number: int, _: FrameType | None) -> None:
        if self._first.acquire(blocking=False):  # the repetition may come while this handler runs
            self._since_s = time.monotonic()
            self.requested = signal.Signals(number).name
            if self._tells:  # not through a stream, which the signal may have interrupted
                more = "; once more: ends at once, without saving" if number == signal.SIGINT else ""
                told = f"> {self.requested}: stopping after this step or the next, and saving{more}\n"
                with contextlib.suppress(OSError):
                    os.write(2, told.encode())
        elif number == signal.SIGINT and time.monotonic() - self._since_s > self.REPEAT_S:
            raise KeyboardInterrupt


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
