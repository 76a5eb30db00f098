"""Fact: every benchmark runs from a checkout, at its smallest size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.tiny_run import ROOT

OWN_TESTS = ("chaos", "gpu_day", "network")  # test_chaos.py, test_gpu_day.py, test_network_benchmark.py
# Everything but `--quick`.
OPTIONS: dict[str, Sequence[str]] = {"tables": ()}


def programs() -> list[str]:
    """Return the names of the programs that users start."""
    found = sorted((ROOT / "benchmarks").glob("*.py"))
    return [
        path.stem for path in found if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("name", [name for name in programs() if name not in OWN_TESTS])
def test_it_runs(name: str) -> None:
    """Bug that this finds: a benchmark that no longer fits the package, found on the day of a measurement."""
    command = [sys.executable, f"benchmarks/{name}.py", *OPTIONS.get(name, ["--quick"])]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_programs_with_tests_of_their_own_are_there() -> None:
    assert {*OWN_TESTS} <= {*programs()}
