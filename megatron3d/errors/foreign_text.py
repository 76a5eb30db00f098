"""Foreign text (from files, names and command lines) as a person may safely read it: escaped, and of bounded length.

Control characters move the cursor, change the state of a terminal, forge lines of a log, or reverse the order in which
a line is read (Boucher and Anderson 2021, arXiv:2111.00169); lone surrogates cannot be written at all.
"""

from __future__ import annotations

import re

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
