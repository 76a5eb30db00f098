"""Entry point of the command-line tools: exit codes, messages, progress bars."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron3d.errors import UserError
from megatron3d.runtime.exit_codes import ExitCode


def run_tool(
    work: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """Run a tool and return its exit code: 0 done, 2 user error (a message per problem), 130 stopped by Ctrl-C.

    2 is also a file that cannot be read or written, 141 a closed output pipe.
    """
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that lacks a character
    try:
        work(arguments)
        sys.stdout.flush()
    except UserError as error:
        for problem in error.problems:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        print(f"{parser.prog}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt as stop:
        print(f"{parser.prog}: stopped; {' '.join(map(str, stop.args)) or 'nothing was written'}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def positive(text: str) -> int:
    """Parse a whole number of at least 1; for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def byte_progress(*more: str) -> Progress:
    """Return a bar of bytes with speed, time left and further columns; on standard error, drawn only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        *map(TextColumn, more),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def spinner(description: str) -> Progress:
    """Return a spinner with the time spent, for work of unknown length."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
    )
    progress.add_task(description, total=None)
    return progress
