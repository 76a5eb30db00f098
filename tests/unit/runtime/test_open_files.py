"""Fact: a run may open as many files as the machine allows, since each connection to another rank is one."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from megatron3d.runtime.machine import raise_open_file_limit

START = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
from megatron3d.runtime import process
with process.start(on_cpu=True):
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), resource.getrlimit(resource.RLIMIT_NOFILE)
"""


@pytest.mark.slow
def test_a_run_raises_the_soft_limit_to_the_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", START], check=True)


def test_a_limit_that_the_system_refuses_to_raise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_open_file_limit() == (1024, 1024)
