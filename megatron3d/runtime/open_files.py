"""Limit of open files, which each connection to another rank counts against."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit; return the soft limits before and after.

    The usual soft limit is 1024.  Rank 0's store has two to three connections from every rank, and each rank opens
    sockets for every communicator, so that a few hundred ranks exceed it.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == hard:
        return before, before
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems refuse an unlimited number
        return before, before
    return before, hard
