"""Entry point of the command-line tools: exit codes, messages, progress bars."""

from __future__ import annotations

import argparse
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

from megatron3d.errors.foreign_text import one_line
from megatron3d.runtime.console import below
from megatron3d.runtime.ending import exit_code_of
from megatron3d.runtime.exit_codes import ExitCode


def run_tool(
    work: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """Run a tool and return its exit code: 0 done, 2 user error (a message per problem), 130 stopped by Ctrl-C.

    2 is also a file that cannot be read or written, 141 a closed output pipe.
    """

    def run() -> int:
        work(parser.parse_args(argv))
        return ExitCode.DONE

    def tell(problems: Sequence[str]) -> None:
        for problem in problems:
            print(f"{parser.prog}: {problem}", file=sys.stderr)

    return exit_code_of(run, tell, "stopped; nothing was written")


def byte_progress(*more: str) -> Progress:
    """Return a bar of bytes with speed, time left and further columns; on standard error, drawn only on a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        *map(TextColumn, more),
        TimeRemainingColumn(),
        console=_terminal(),
    )


def spinner(description: str) -> Progress:
    """Return a spinner with the time spent, for work of unknown length."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=_terminal()
    )
    progress.add_task(one_line(description), total=None)
    return progress


def _terminal() -> Console:
    """Return a console for output that moves the cursor, on standard error."""
    return Console(file=below(sys.stderr))
