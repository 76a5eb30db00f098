"""Fact: under a real SLURM, an elastic run outlives a node that fails, and reaches its end in the same job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.pool import Pool
from tests.support.slurm import NODES, Job, Slurm, missing
from tests.support.tiny_run import ROOT, in_run, run_as_rank, steps, write_config
from tools import make_slurm

ITERS = 30
KEYS = [f"train.train_iters={ITERS}", "train.precision=fp64", "optimizer.lr=1e-3", "train.micro_batch_size=1"]
CLUSTER = """
name: two nodes of two processes
accelerator: cpu
cores: 2
levels: [{name: node, ranks: 2, gb_s: 1, latency_us: 1}, {name: network, ranks: 4, gb_s: 1, latency_us: 1}]
source: this test
"""
# A step takes long enough for a node to fail before the last one.
SLOW = """
import sys, time
sys.path.insert(0, {root!r})
import pretrain_gpt
from megatron3d.runtime import process
from megatron3d.train import loop

step = loop.train_step
loop.train_step = lambda *args, **named: (time.sleep(0.3), step(*args, **named))[1]
sys.exit(process.run_program(pretrain_gpt.main))
"""


def test_a_node_that_fails_does_not_end_the_job(tmp_path: Path, pool: Pool) -> None:
    if why := missing():
        pytest.skip(why)
    config, folder, log = write_config(tmp_path), tmp_path / "elastic", tmp_path / "job.log"
    (tmp_path / "two.yaml").write_text(CLUSTER)
    (tmp_path / "slow.py").write_text(SLOW.format(root=str(ROOT)))
    typed = [
        "--config",
        str(config),
        "--cluster",
        str(tmp_path / "two.yaml"),
        "--nodes",
        "2",
        "--time",
        "10",
        "--warn",
        "30",
    ]
    typed += ["--python", sys.executable, "--sbatch", f"output={log}", "--output", str(tmp_path / "job.sbatch")]
    typed += [*in_run(str(folder)), *KEYS, "train.elastic=true"]
    assert make_slurm.main(typed) == 0
    job = tmp_path / "job.sbatch"
    job.write_text(job.read_text().replace(" pretrain_gpt.py ", f" {tmp_path}/slow.py "))
    (tmp_path / "slurm").mkdir()
    with contextlib.closing(Slurm(tmp_path / "slurm")) as cluster:
        cluster.start()
        number = cluster.run("sbatch", "--parsable", str(job)).strip()
        journal = folder / "metrics.jsonl"
        cluster.until(
            lambda: journal.exists() and len(steps(folder)) > 2, lambda: log.read_text() if log.exists() else ""
        )
        for member in json.loads((folder / "members.json").read_text())["members"][2:]:
            os.kill(member[-1], signal.SIGKILL)
        cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=lost")
        assert cluster.wait(number) == Job("COMPLETED", ExitCode.DONE, 0), log.read_text()
    said = log.read_text()
    assert "> lost processes: 2, 3; training goes on from iteration" in said and "> done: ranks were lost" in said
    pool.run(run_as_rank, 1, config, [[*in_run(str(tmp_path / "whole")), *KEYS]])
    pairs = zip(steps(folder), steps(tmp_path / "whole"), strict=True)
    assert max(abs(mine[1] - other[1]) for mine, other in pairs) < 1e-10
