"""Fact: a run whose ranks are killed and whose checkpoints are damaged ends with the losses of a run without faults."""

from __future__ import annotations

import subprocess
import sys

from tests.support.tiny_run import ROOT


def test_a_round_of_faults() -> None:
    """Run one round with two kills and two damaged checkpoints; benchmarks/chaos.py runs many."""
    command = [sys.executable, "benchmarks/chaos.py", "--rounds", "1", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 1 of 1: {'fault': 'all', 'tried': 4, 'survived': 4}" in done.stdout
