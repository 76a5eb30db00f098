"""Fact: Ctrl-C while a program imports, works or ends gives one message or none, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.processes import start
from tests.support.tiny_run import ROOT

CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\n"


def run(folder: Path, *command: str) -> tuple[str, int]:
    """Return messages and exit code of a program that prefers the modules in a folder."""
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = start([sys.executable, *command], env=environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return done.communicate(timeout=60)[1], done.returncode


@pytest.mark.parametrize(
    ("module", "program", "typed"),
    [
        ("rich", "tools/plan.py", "--help"),
        ("torch", "tools/generate.py", "--load=run"),
        ("yaml", "tools/plan.py", "--top=3"),
        ("rich", "pretrain_gpt.py", "--help"),
    ],
)
def test_while_it_imports(tmp_path: Path, module: str, program: str, typed: str) -> None:
    (tmp_path / f"{module}.py").write_text(CTRL_C)
    message = f"{Path(program).name}: stopped; nothing was written\n"
    assert run(tmp_path, program, typed) == (message, ExitCode.INTERRUPTED)


def test_while_it_ends(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import atexit\natexit.register(lambda: exec({CTRL_C!r}))\n")
    assert run(tmp_path, "tools/make_corpus.py", "--help") == ("", ExitCode.DONE)
