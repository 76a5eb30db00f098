"""Run a target on many inputs in a child process with limits of time and memory, so that no input ends the fuzzer.

A failure is any exception but UserError, a message that is long or has control characters, data that differ though a
checksum protects them, more than `CPU_S` seconds, more than `MEMORY_BYTES`, and a crash of the interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

from megatron3d.errors import UserError
from tests.fuzz.documents import mutate

CPU_S, WALL_S, MEMORY_BYTES = 5.0, 120.0, 2**30
MAX_MESSAGE, MAX_FAILURES = 3000, 20
# Control characters, lines' and paragraphs' ends, reversed text, halves of characters.
HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
REFUSED, READ = "refused", "read"
Files = Mapping[str, bytes]


class Target(NamedTuple):
    """A file format and its reader.

    Attributes:
        write: writes valid files into a folder.
        read: reads that folder as the program does, and returns the data; raises UserError.
        tokens: words of the format.
        mutated: names of the files to mutate; all by default.
        seal: makes checksums in changed files right again.
        accepts: whether data (second argument) are right, given the original's; without it any data are.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    tokens: tuple[bytes, ...] = ()
    mutated: tuple[str, ...] = ()
    seal: Callable[[Files], Files] | None = None
    accepts: Callable[[object, object], bool] | None = None


class Failure(NamedTuple):
    """An input that a target neither refused nor read rightly."""

    number: int
    kind: str
    detail: str


@dataclass
class Outcome:
    """Numbers of inputs that were read and refused, and the failures."""

    num_read: int = 0
    num_refused: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, index: int, kind: str, detail: str) -> None:
        """Count one input."""
        self.num_read += kind == READ
        self.num_refused += kind == REFUSED
        if kind not in (READ, REFUSED):
            self.failures.append(Failure(index, kind, detail))


class TooSlow(BaseException):
    """An input has taken more CPU time than allowed."""


class Stopwatch:
    """Raises TooSlow where its block takes too long, and remembers it in case the reader catches that."""

    def __init__(self) -> None:
        self.has_rung = False
        signal.signal(signal.SIGPROF, self._ring)

    def _ring(self, *_: object) -> NoReturn:
        self.has_rung = True
        raise TooSlow(f"more than {CPU_S:g} s of CPU time")

    def __enter__(self) -> None:
        self.has_rung = False
        signal.setitimer(signal.ITIMER_PROF, CPU_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def files_in(folder: Path) -> Files:
    """Return the files of a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_files(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def make_input(target: Target, files: Files, seed: int, index: int) -> Files:
    """Return the files of one input, in which one file is mutated."""
    rng = Random(f"{target.name} {seed} {index}")
    name = rng.choice(target.mutated or sorted(files))
    changed = {**files, name: mutate(rng, Path(name).suffix, files[name], target.tokens)}
    return target.seal(changed) if target.seal else changed


def try_input(target: Target, folder: Path, original: object, stopwatch: Stopwatch) -> tuple[str, str]:
    """Read one input; return its outcome and, of a failure, the details."""
    kind, detail = READ, ""
    try:
        with stopwatch:
            data = target.read(folder)
        if target.accepts and not target.accepts(original, data):
            kind, detail = "wrong data", f"{str(original)[:500]}\nbut read\n{str(data)[:500]}"
    except UserError as error:
        bad = [text for text in error.problems if not 0 < len(text) <= MAX_MESSAGE or HARMFUL.search(text)]
        kind, detail = ("bad message", ascii(bad[0])[:2000]) if bad else (REFUSED, "")
    except BaseException as error:  # a panic of a Rust library is no Exception
        kind, detail = type(error).__name__, traceback.format_exc()
    return ("TooSlow", detail or traceback.format_exc()) if stopwatch.has_rung else (kind, detail)


class Fuzzer:
    """Runs a target on its inputs, in a new child process after each crash, up to a number of failures."""

    def __init__(self, target: Target, folder: Path, seed: int, max_failures: int = MAX_FAILURES) -> None:
        self._target, self._seed, self._max_failures = target, seed, max_failures
        self._valid, self._input = folder / "valid", folder / "input"
        self._results, self._output = folder / "results", folder / "output"
        self._valid.mkdir()
        target.write(self._valid)
        self._files, self._original = files_in(self._valid), target.read(self._valid)
        again = target.read(self._valid)
        assert not target.accepts or target.accepts(self._original, again), f"{target.name}: its own files differ"

    def run(self, indices: Sequence[int]) -> Outcome:
        """Try the inputs of these numbers."""
        outcome = Outcome()
        while indices and len(outcome.failures) < self._max_failures:
            self._results.write_text("")
            child = os.fork()
            if not child:
                self._run_child(indices, self._max_failures - len(outcome.failures))
            reason = self._wait(child)
            lines = self._results.read_text().splitlines()
            for line in lines:
                outcome.add(*json.loads(line))
            if reason is None:
                break
            outcome.add(indices[len(lines)], reason, self._output.read_text(errors="replace"))
            indices = indices[len(lines) + 1 :]
        return outcome

    def _run_child(self, indices: Sequence[int], max_failures: int) -> NoReturn:
        """Try inputs in a forked process and end it."""
        code = 1
        try:
            self._limit()
            self._try_all(indices, max_failures)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _limit(self) -> None:
        """Direct the output to a file, and limit time and memory."""
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(output, standard)
        faulthandler.enable(output)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.RLIM_INFINITY))

    def _try_all(self, indices: Sequence[int], max_failures: int) -> None:
        """Try the inputs in turn, and write a line of JSON for each."""
        stopwatch = Stopwatch()
        with self._results.open("a") as results:
            for index in indices:
                write_files(self._input, make_input(self._target, self._files, self._seed, index))
                kind, detail = try_input(self._target, self._input, self._original, stopwatch)
                results.write(json.dumps([index, kind, detail]) + "\n")
                results.flush()
                max_failures -= kind not in (READ, REFUSED)
                if not max_failures:
                    return

    def _wait(self, child: int) -> str | None:
        """Return why the child ended early, None if it did not; kill it after `WALL_S` seconds with one input."""
        size, since = 0, time.monotonic()
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return None if code == 0 else f"ended by signal {-code}" if code < 0 else f"ended with {code}"
            if (now := self._results.stat().st_size) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > WALL_S:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hang"
            time.sleep(0.02)
