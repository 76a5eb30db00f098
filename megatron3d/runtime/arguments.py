"""Command lines: their parser, the files that a program may write, and the largest numbers, texts and files.

Anything larger is a typing error: loops over it would not end, and 64 bits would not hold it.  A program writes no file
that it reads, and none that is there already unless `--overwrite` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from megatron3d.errors import UserError

MAX_NUMBER = 10**12
# Help of an option that names a checkpoint.
CHECKPOINT = "a run's folder, or one of its checkpoints"
BEST: Literal["best"] = "best"
MAX_RANKS = 10**6
# torch.Generator takes 64 bits, and tools add the number of a text to the seed.
MAX_SEED = 2**62
# Tasks among which a preprocessing job is divided.
MAX_SHARDS = 10**6
# Forwards of all ranks of a pipeline in one step; simulating a schedule of this size takes seconds.
MAX_SCHEDULE_SIZE = 2**17
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


class _Help(argparse.HelpFormatter):
    """Help that ends with an option's default, unless its text says what that is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, about = action.default, action.help
        if not about or "default" in about or action.nargs == 0 or default in (None, argparse.SUPPRESS, []):
            return about
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{about}; default: {shown}".replace("%", "%%")


class _WithoutOption(argparse.Action):
    """Values of an option that are given without its name."""

    def __init__(self, option: argparse.Action, **settings: Any) -> None:
        super().__init__(**settings)
        self._option = option

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: str | None = None
    ) -> None:
        expected = 1 if self._option.nargs is None else self._option.nargs
        if isinstance(expected, int) and len(values) != expected:
            parser.error(f"argument {self._option.option_strings[0]}: expected {expected}, not {len(values)}")
        setattr(namespace, self.dest, values[0] if self._option.nargs is None else values)
        self._option.required = False


class ToolParser(argparse.ArgumentParser):
    """Parser of a program's command line, which ends the program with exit code 2 and a short message.

    Attributes:
        before_error: called before a message; programs of several ranks wait here, so that one of them tells it.
    """

    before_error: ClassVar[Callable[[], object]] = staticmethod(lambda: None)

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(prog, formatter_class=_Help, **settings)

    def add_alias(self, once: str, option: str) -> None:
        """Also take an option under the name that it once had, which `--help` does not show."""
        self._option_string_actions[once] = self._option_string_actions[option]

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, each word of it shortened, and exit with code 2."""
        ToolParser.before_error()
        words = re.sub(rf"\S{{{MAX_QUOTED},}}", lambda word: shorten(word[0]), message)
        super().error(shorten(words, 10 * MAX_QUOTED))


def whole(least: int = 0, most: int = MAX_NUMBER) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`, for argparse."""

    def parse(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)} is not a whole number of {least} to {most}")
        return number

    return parse


def real(least: float = 0.0, most: float = MAX_NUMBER) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`, for argparse; neither nan nor infinity is one."""

    def parse(text: str) -> float:
        try:
            number = float(text) if text.isascii() else math.nan
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)} is not a number of {least:g} to {most:g}")
        return number

    return parse


positive = whole(1)


def saved_iteration(text: str) -> int | Literal["best"]:
    """Return the iteration of a checkpoint, or "best", for argparse."""
    return BEST if text == BEST else whole()(text)


def add_load(parser: argparse.ArgumentParser, about: str, nargs: int | str | None = None) -> None:
    """Add the option `--load`, which names runs or checkpoints to read; its name may be left out, as it once was."""
    option = parser.add_argument("--load", type=Path, nargs=nargs, required=True, metavar="RUN", help=about)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("load", type=Path, nargs="*", action=_WithoutOption, option=option, **hidden)


def add_iteration(parser: argparse.ArgumentParser) -> None:
    """Add the option `--iteration`, which chooses a checkpoint of the run `--load`."""
    about = "the checkpoint of the run --load to take: an iteration, or best; default: the newest"
    parser.add_argument("--iteration", type=saved_iteration, metavar="N", help=about)


def add_weights(parser: argparse.ArgumentParser, default: str | None = "model", when: str = "") -> None:
    """Add the option `--weights`, which chooses the weights of a checkpoint or their moving average."""
    about = "ema: the moving average of the weights, which runs with optimizer.ema_decay store; default: model"
    parser.add_argument("--weights", choices=("model", "ema"), default=default, help=when + about)


@contextlib.contextmanager
def naming_options(section: str = "data") -> Iterator[None]:
    """Raise the UserError of the body with a tool's options in place of a section's keys, which have the same names."""
    try:
        yield
    except UserError as error:
        raise UserError(*(re.sub(rf"\b{section}\.(\w+)(=?)", _option, each) for each in error.problems)) from error


def _option(key: re.Match[str]) -> str:
    return f"--{key[1].replace('_', '-')}{' ' if key[2] else ''}"


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
