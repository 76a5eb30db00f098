"""Fact: damaged files of every format are refused or read as what they were, and seeded defects are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.defects import DEFECTS
from tests.fuzz.targets import TARGETS
from tests.support.tiny_run import ROOT

NUM_INPUTS = 200  # scripts/fuzz.sh feeds thousands


def run(*arguments: str) -> list[str]:
    """Run the fuzzers in a process of its own, and return its lines."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", str(NUM_INPUTS), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Return the output of all fuzzers."""
    return run()


@pytest.mark.parametrize("name", TARGETS)
def test_files_are_refused_or_read_rightly(lines: list[str], name: str) -> None:
    (place,) = [place for place, line in enumerate(lines) if line.startswith(f"{name} ")]
    _, num_read, _, num_refused, _, num_failed, *_ = lines[place].split()
    assert (int(num_read) + int(num_refused), num_failed) == (NUM_INPUTS, "0"), "\n".join(lines[place : place + 40])
    assert int(num_read) >= 5 and int(num_refused) >= NUM_INPUTS // 5, (
        "mutations that change nothing, or everything, show little"
    )


def test_seeded_defects_are_found() -> None:
    lines = run("--defects")
    assert [name for name in DEFECTS if f"{name}: found" not in lines] == [], "\n".join(lines)


def test_an_input_can_be_repeated() -> None:
    """Its number and the seed determine an input, whose files are kept."""
    contents = []
    for _ in range(2):
        folder = Path(run("schedule", "--only", "12", "--seed", "3")[-1].removeprefix("  its files: "))
        contents.append((folder / "schedule.csv").read_bytes())
        shutil.rmtree(folder.parent)
    assert contents[0] == contents[1]
