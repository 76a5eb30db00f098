"""Errors in user input, exit codes, and foreign text as a person may safely read it: escaped, and of bounded length.

Foreign text comes from files, names and command lines.  Control characters move the cursor, change the state of a
terminal, forge lines of a log, or reverse the order in which a line is read (Boucher and Anderson 2021,
arXiv:2111.00169); lone surrogates cannot be written at all.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from enum import IntEnum

MAX_LENGTH, _TAIL = 2000, 500
# C0 except tab and newline, DEL, C1, line and paragraph separators, bidirectional controls, surrogates.
_HARMFUL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_HARMFUL}]"), re.compile(rf"[{_HARMFUL}\t\n]")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def escaped(text: str) -> str:
    r"""Return text with harmful characters written as `\x1b`; tabs and newlines stay."""
    return _IN_TEXT.sub(_escape, text)


def is_one_line(text: str) -> bool:
    """Return whether text can be shown as it is, in one line."""
    return _IN_LINE.search(text) is None


def one_line(text: object) -> str:
    r"""Return `str(text)` as one line of at most `MAX_LENGTH` characters: newlines as `\n`, the middle left out."""
    return shortened(_IN_LINE.sub(_escape, str(text)))


def shortened(text: str) -> str:
    """Return text without its middle if it is longer than `MAX_LENGTH`; a message says at its end what to change."""
    if len(text) <= MAX_LENGTH:
        return text
    note = f" [{len(text):,} characters] "
    return text[: MAX_LENGTH - _TAIL - len(note)] + note + text[-_TAIL:]


class RunFailed(RuntimeError):
    """A run that all ranks end with exit code 1 for a reason that its one line says: no input is wrong by itself."""


MAX_PROBLEMS = 100


class UserError(ValueError):
    """One or more problems, each a sentence with the field, the value, the rule and a change that works.

    Each becomes one line of bounded length without control characters, whatever names and values it quotes; of very
    many, only the first `MAX_PROBLEMS` are kept.
    """

    def __init__(self, *problems: str) -> None:
        lines = [one_line(problem) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"and {len(problems) - MAX_PROBLEMS:,} more problems: correct these first")
        super().__init__(*lines)
        self.problems = tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @classmethod
    def of(cls, error: OSError) -> UserError:
        """Return the error for a file that cannot be read or written."""
        return cls(f"{error.filename or 'a file'}: {error.strerror or error}")

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise one error with all problems, if there are any."""
        found = tuple(problems)
        if found:
            raise cls(*found)


# Faults of a disk, a network or a node rather than of what was typed, nor damage: the same may succeed a moment later.
MACHINE_FAULTS = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY),
    }
)


def is_machine_fault(error: Exception) -> bool:
    """Return whether an error is one of `MACHINE_FAULTS`; libraries in Rust give the number in the text only."""
    if not isinstance(error, OSError):
        return False
    found = re.search(r"\(os error ([0-9]{1,4})\)", str(error)) if error.errno is None else None
    return (int(found[1]) if found else error.errno) in MACHINE_FAULTS


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
