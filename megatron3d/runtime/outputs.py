"""Which files a program may write: none that it reads, and none that is there already unless `--overwrite` is given."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron3d.errors import UserError


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="replace output files that exist")


def require_free(option: str, outputs: Iterable[Path], inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Raise UserError for outputs that are inputs, under whatever name, and for those that exist.

    Devices and pipes are written to and not replaced, so that nothing is lost in them.

    Args:
        option: the option that names the outputs, such as `--output`.
        overwrite: whether outputs that exist may be replaced; an input never is.
    """
    read = {_identity(path): path for path in inputs}
    UserError.collect(_problems(option, outputs, read, overwrite))


def _problems(option: str, outputs: Iterable[Path], read: dict[object, Path], overwrite: bool) -> Iterator[str]:
    for path in outputs:
        if (source := read.get(_identity(path))) is not None:
            same = "" if source == path else f", the same file as {source}"
            yield f"{option} {path}: also an input{same}; name another, which replaces nothing that is read"
        elif not overwrite and (path.is_file() or path.is_symlink()):
            yield f"{option} {path}: exists already; name another, or add --overwrite to replace it"


def _identity(path: Path) -> object:
    """Return a value that all names of a file share: links, other spellings, other mounts of its file system."""
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino
