"""Fact: every measurement of the job for two nodes can run there, and one that fails does not keep the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.config.cli import parse_args
from megatron3d.config.resolve import resolve
from tests.support.tiny_run import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
JOB = "scripts/slurm/two_nodes.sbatch"
# Record the words of each step; the first step fails.
STUB = """#!/bin/bash
for word; do printf '%s\\0' "$word"; done >>"$RECORD"
printf '\\n' >>"$RECORD"
[[ $* != *network.py* ]]
"""


def steps(folder: Path, *arguments: str) -> tuple[int, list[list[str]]]:
    """Run the job with a stub for srun; return its exit code and the words of each step."""
    (folder / "srun").write_text(STUB)
    (folder / "srun").chmod(0o755)
    record = folder / "record"
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record), "PYTHON": "python"}
    done = subprocess.run(["bash", JOB, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    lines = record.read_text().splitlines() if record.exists() else []
    return done.returncode, [line.rstrip("\0").split("\0") for line in lines]


def test_every_step_is_a_run_of_sixteen_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: a layout that 16 ranks cannot have, found after a day in a queue."""
    from gpu.gpu_program import command
    from network import main as network

    monkeypatch.chdir(ROOT)
    code, (first, *runs) = steps(tmp_path, "dgx_h200", str(tmp_path / "out"))
    assert code == 1 and len(runs) == 5
    with pytest.raises(SystemExit) as stop:
        network([*first[first.index("benchmarks/network.py") + 1 :], "--help"])
    assert stop.value.code == 0
    layouts = set()
    for words in runs:
        output, *overrides = words[words.index("--output") + 1 :]
        program = command(tmp_path / "bytes", Path(output), overrides)
        typed = parse_args(program[program.index(str(ROOT / "pretrain_gpt.py")) + 1 :])
        config = resolve(typed.config, typed.overrides, 16, elsewhere=True).config
        layouts.add((config.parallel.zero_stage, config.parallel.pipeline_schedule, Path(output).name))
    assert len(layouts) == 5


def test_a_missing_argument_is_refused(tmp_path: Path) -> None:
    assert steps(tmp_path, "dgx_h200") == (2, [])
