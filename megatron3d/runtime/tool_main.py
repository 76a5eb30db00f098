"""What every command-line tool shares: exit codes, messages, progress."""

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
    """Exit code of a tool: 0 done, 2 what the user gave is wrong (a message per problem), 130 stopped by Ctrl-C.

    2 is also a file that the system does not let it read or write, 141 that nobody reads what it prints.
    """
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a terminal that lacks a character
    try:
        work(arguments)
        sys.stdout.flush()
    except UserError as error:
        for problem in error.problems:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BrokenPipeError:  # such as in `| head`: nobody reads on
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
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def byte_progress(*more: str) -> Progress:
    """A bar of bytes with its speed and time left, and columns of more; on standard error, drawn only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        *map(TextColumn, more),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def waiting(description: str) -> Progress:
    """A spinner with the time spent, for work that cannot say how far it is."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
    )
    progress.add_task(description, total=None)
    return progress
