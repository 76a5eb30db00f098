"""End of a program: errors that its user can mend become messages and an exit code instead of a traceback."""

from __future__ import annotations

from megatron3d.runtime.interrupt import interruptible

import contextlib
import errno
import sys
from collections.abc import Callable, Sequence

from megatron3d.errors import UserError
from megatron3d.runtime.console import protect
from megatron3d.runtime.exit_codes import ExitCode

# Faults of a disk, a network or a node rather than of what was typed: a batch system may try again.
MACHINE_FAULTS = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY),
    }
)


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
    except BrokenPipeError:  # as in `| head`
        return ExitCode.BROKEN_PIPE
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        tell(UserError.of(error).problems)
        if error.errno in MACHINE_FAULTS:
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
