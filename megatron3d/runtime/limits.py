"""The largest numbers, texts and files that a person may give; runtime/arguments.py has the parsers that hold to them.

Anything larger is a typing error: loops over it would not end, and 64 bits would not hold it.
"""

from __future__ import annotations

import errno
import re
import stat
from pathlib import Path

MAX_NUMBER = 10**12
MAX_RANKS = 10**6
# torch.Generator takes 64 bits, and tools add the number of a text to the seed.
MAX_SEED = 2**62
# Tasks among which a preprocessing job is divided.
MAX_SHARDS = 10**6
# Forwards of all ranks of a pipeline in one step; simulating a schedule of this size takes seconds.
MAX_SCHEDULE_SIZE = 2**16
# Characters of a value that a message quotes.
MAX_QUOTED = 200
# Bytes of a file that a person writes: a configuration, or the description of a cluster.
MAX_FILE_BYTES = 2**18


def shorten(text: str, length: int = MAX_QUOTED) -> str:
    """Return the text, cut to `length` characters with dots at the end."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def whole_number(text: str) -> int | None:
    """Return the whole number that ASCII digits write, with an optional sign and `_` between digits; None for others.

    A number of more than 40 digits is None, too.
    """
    return int(text) if len(text) <= 40 and re.fullmatch(r"[-+]?[0-9]+(_[0-9]+)*", text) else None


def read_limited(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; raises OSError for any other, one above `most` bytes, or no file name."""
    try:
        status = path.stat()
    except ValueError as error:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "not a file name", str(path)) from error
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    content = bytearray()
    with path.open("rb") as file:
        while len(content) <= most and (block := file.read(MAX_FILE_BYTES)):  # `read` allocates what it is asked for
            content += block
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return bytes(content)
