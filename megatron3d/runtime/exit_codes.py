"""Exit codes of every program of this repository; the SLURM job and docs/survival.md name them too."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a process ended.

    Attributes:
        CRASH: an unexpected exception, or a node that is unfit.
        USER_ERROR: invalid user input (`UserError`); argparse uses the same code.
        STOPPED: stopped on request, after saving a checkpoint.
        INTERRUPTED: Ctrl-C, as shells report SIGINT (128 + 2).
        BROKEN_PIPE: nobody reads the output any more, as shells report SIGPIPE (128 + 13).
    """

    DONE = 0
    CRASH = 1
    USER_ERROR = 2
    STOPPED = 3
    INTERRUPTED = 130
    BROKEN_PIPE = 141
