"""Seeded defects of readers.  Each must be found by its fuzzer, which otherwise could not fail."""

from __future__ import annotations

import os
import pkgutil
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn
from unittest import mock

Function = Callable[..., Any]


class Defect(NamedTuple):
    """A function of the reader of a target that is replaced, and the kind of failure that must be found."""

    target: str
    replaced: str
    change: Callable[[Function], object]
    kind: str

    def seed(self) -> AbstractContextManager[object]:
        """Return the context in which the defect exists."""
        return mock.patch(self.replaced, self.change(pkgutil.resolve_name(self.replaced)))


class _Equal(str):
    """Checksum that equals every other one."""

    def __ne__(self, other: object) -> bool:
        return False

    __eq__, __hash__ = str.__eq__, str.__hash__


class _Hashes:
    """Stand-in for hashlib, whose checksums equal every other one."""

    def sha256(self) -> _Hashes:
        """Return a digest."""
        return self

    def update(self, block: bytes) -> None:
        """Ignore the content."""

    def hexdigest(self) -> _Equal:
        """Return the checksum."""
        return _Equal("0" * 64)


def on_refusal(action: Callable[[], object]) -> Callable[[Function], Function]:
    """Return a change of a function: where it raises ValueError, the action happens first."""

    def change(function: Function) -> Function:
        def changed(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except ValueError:
                action()
                raise

        return changed

    return change


def _raise() -> NoReturn:
    raise KeyError("seeded")


def _loop() -> NoReturn:
    while True:
        pass


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


PARSE = "megatron3d.metrics.journal._parse"
DEFECTS: Mapping[str, Defect] = {
    "index without checksum": Defect(
        "checkpoint", "megatron3d.checkpoint.index.Index.is_intact", lambda _: lambda index: True, "wrong data"
    ),
    "boxes without checksums": Defect(
        "safetensors", "megatron3d.checkpoint.read.checksum", lambda _: lambda box: _Equal(), "wrong data"
    ),
    "token files without checksums": Defect(
        "token_files", "megatron3d.data.token_files.indexed.hashlib", lambda _: _Hashes(), "wrong data"
    ),
    "another exception": Defect("schedule", "megatron3d.pipeline.validate.parse_cell", on_refusal(_raise), "KeyError"),
    "an endless loop": Defect("launches", PARSE, on_refusal(_loop), "TooSlow"),
    "two gigabytes": Defect("launches", PARSE, on_refusal(lambda: bytearray(2**31)), "MemoryError"),
    "a crash": Defect("launches", PARSE, on_refusal(_send(signal.SIGSEGV)), "ended by signal 11"),
    "control characters in messages": Defect("config", "megatron3d.errors.one_line", lambda _: str, "bad message"),
}
