"""Fact: a file that cannot be written completely is one message, and neither it nor a part of it is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.tiny_run import ROOT

SCHEDULE = "plot_schedule.py --schedule 1f1b -p 8 -m 64 --output {}"
PLAN = "plan.py --config configs/gpt2-124m.yaml --cluster selene --world-size 8"
COMMANDS = {
    "out.json": SCHEDULE,
    "out.csv": SCHEDULE,
    "out.png": SCHEDULE,
    "layout.svg": "draw_layouts.py --mode 3d --output {}",
    "job.sbatch": "make_slurm.py --config configs/gpt3-175b.yaml --cluster selene --nodes 128 --output {}",
    "plan.png": f"{PLAN} --picture {{}}",
    "plan.yaml": f"{PLAN} --output {{}}",
    "corpus.jsonl": "make_corpus.py --output {}",
    "memory.svg": "../pretrain_gpt.py --config configs/gpt2-124m.yaml --dry-run --world-size 40 --picture {}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_leaves_nothing(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """No file may be larger than a kilobyte, which fails as a full disk does, in the middle of writing.

    That must not hold for Python's own files of bytecode, which would be left damaged.
    """
    command = COMMANDS[name].format(tmp_path / name)
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; exec {sys.executable} tools/{command}"],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MPLCONFIGDIR": str(tmp_path_factory.getbasetemp()),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == ExitCode.USER_ERROR, done.stderr
    assert "Traceback" not in done.stderr and "File too large" in done.stderr and name in done.stderr
    assert list(tmp_path.iterdir()) == []
