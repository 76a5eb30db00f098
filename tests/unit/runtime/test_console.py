"""Fact: what a program prints is escaped, and an output that is closed or full ends it with one message and a code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.tiny_run import ROOT

HEAD = (
    "import sys\nfrom megatron3d.errors import UserError\n"
    "from megatron3d.runtime import process, program as console\n\n\n"
)


def program(folder: Path, body: str) -> Path:
    """Write a program whose main has this body."""
    path = folder / "program.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{HEAD}def main():\n{lines}    return 0\n\n\nsys.exit(process.run_program(main))\n")
    return path


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command; its code is that of the first program of a pipe."""
    return subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run(folder: Path, body: str, rest: str = "") -> subprocess.CompletedProcess[str]:
    return shell(f"{sys.executable} {program(folder, body)} {rest}")


def test_everything_printed_is_escaped(tmp_path: Path) -> None:
    body = r"""
print("a\x1b[31m\r\udcff\u202e\x9b", "\tb")
print("\r 10 %", end="", file=sys.stderr)
print("\nc\x1b\r" + 9000 * "d", file=sys.stderr)
raise RuntimeError("\x1b[2J")
"""
    done = run(tmp_path, body.strip())
    assert done.stdout == "a\\x1b[31m\\r\\udcff\\u202e\\x9b \tb\n"
    assert "\x1b" not in done.stderr and "RuntimeError: \\x1b[2J" in done.stderr and done.returncode == ExitCode.CRASH
    assert done.stderr.split("\n")[2].startswith("c\\x1b\\rddd") and "[9,007 characters]" in done.stderr


def test_what_is_printed_while_a_bar_is_drawn_is_escaped(tmp_path: Path) -> None:
    """On a terminal rich would take over both streams."""
    body = r"""
with console.spinner("works") as progress:
    assert progress.console.is_terminal
    print("\x1b]0;a\x07")
    print("\x1b]0;b\x07", file=sys.stderr)
"""
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, str(program(tmp_path, body.strip()))],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdout=slave,
        stderr=slave,
        check=True,
    )
    shown = os.read(master, 100_000)
    for handle in (master, slave):
        os.close(handle)
    assert done.returncode == 0 and b"\x1b]" not in shown
    assert rb"\x1b]0;a\x07" in shown and rb"\x1b]0;b\x07" in shown


@pytest.mark.parametrize(
    ("body", "rest", "code", "message"),
    [
        ("print('x' * 10**6)", "| true", ExitCode.BROKEN_PIPE, ""),
        ("print('x')", "> /dev/full", ExitCode.USER_ERROR, "standard output: No space left on device\n"),
        ("print('x' * 10**6)", "> /dev/full", ExitCode.USER_ERROR, "standard output: No space left on device\n"),
        ("raise UserError('lr=x')", "> /dev/full", ExitCode.USER_ERROR, "lr=x\n"),
        ("print('x')\nraise UserError('lr=x')", "> /dev/full", ExitCode.USER_ERROR, "lr=x\n"),
        ("raise UserError('lr=x')", "2> /dev/full", ExitCode.USER_ERROR, ""),
        ("print('x')\nraise UserError('lr=x')", ">&- 2>&-", ExitCode.USER_ERROR, ""),
        ("open('/dev/null/x')", "", ExitCode.USER_ERROR, "/dev/null/x: Not a directory\n"),
        ("open('x' * 300)", "", ExitCode.USER_ERROR, f"{'x' * 300}: File name too long\n"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['-h'])", "> /dev/full", 2, "standard output: "),
    ],
)
def test_files_and_pipes_that_fail_are_one_message(
    tmp_path: Path, body: str, rest: str, code: int, message: str
) -> None:
    done = run(tmp_path, body, rest)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message) and done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize("rest", ["| true", "> /dev/full"])
def test_a_run_goes_on_without_its_console(tmp_path: Path, rest: str) -> None:
    body = "console.outlive_readers()\nfor _ in range(100):\n    print('x' * 10**5, flush=True)\n"
    body += f"open('{tmp_path}/end', 'w')"
    done = run(tmp_path, body, rest)
    assert done.returncode == 0 and (tmp_path / "end").exists()
    assert done.stderr.startswith("> standard output cannot be written any more (") and done.stderr.count("\n") == 1


def test_a_lost_connection_is_a_crash(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ConnectionResetError('peer')")
    assert done.returncode == ExitCode.CRASH and "Traceback" in done.stderr
