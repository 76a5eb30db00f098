"""Console of a program: everything that is printed passes here, escaped, and a closed or full output is no traceback.

Progress bars move the cursor and are written to the stream below (`below`).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, cast

from megatron3d.errors.foreign_text import escaped, shortened


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
