"""Fact: under a real SLURM, an elastic run outlives a node that fails, and reaches its end in the same job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from tests.support.pool import Pool
from tests.support.slurm import CLUSTER, NODES, Job, Slurm, missing
from tests.support.tiny_run import ROOT, in_run, run_as_rank, steps, write_config
from tools import make_slurm

ITERS = 30
KEYS = [f"train.train_iters={ITERS}", "train.precision=fp64", "optimizer.lr=1e-3", "train.micro_batch_size=1"]
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


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(Slurm(tmp_path_factory.mktemp("slurm"))) as cluster:  # sockets need a short path
        cluster.start()
        yield cluster


class ElasticJob:
    """Job of an elastic run on the nodes of a cluster, and its log."""

    def __init__(self, slurm: Slurm, folder: Path, typed: Sequence[str], keys: Sequence[str] = KEYS) -> None:
        config, script = write_config(folder), folder / "job.sbatch"
        (folder / "two.yaml").write_text(CLUSTER)
        (folder / "slow.py").write_text(SLOW.format(root=str(ROOT)))
        words = ["--config", str(config), "--cluster", str(folder / "two.yaml"), "--time", "10", "--warn", "30", *typed]
        words += ["--python", sys.executable, "--sbatch", f"output={folder}/job.log", "--output", str(script)]
        assert make_slurm.main([*words, *in_run(str(folder / "elastic")), *keys, "train.elastic=true"]) == 0
        script.write_text(script.read_text().replace(" pretrain_gpt.py ", f" {folder}/slow.py "))
        self._slurm, self._folder, self._keys, self.run = slurm, folder / "elastic", keys, folder
        self._number = slurm.run("sbatch", "--parsable", str(script)).strip()

    @property
    def said(self) -> str:
        log = self.run / "job.log"
        return log.read_text() if log.exists() else ""

    def lose(self, *ranks: int) -> None:
        """Kill the processes of ranks once some steps are done."""
        journal = self._folder / "metrics.jsonl"
        self._slurm.until(lambda: journal.exists() and len(steps(self._folder)) > 2, lambda: self.said)
        members = json.loads((self._folder / "members.json").read_text())["members"]
        for rank in ranks:
            os.kill(members[rank][-1], signal.SIGKILL)

    def assert_done(self, pool: Pool) -> None:
        """Require that the job ends well, with the losses of one process."""
        assert self._slurm.wait(self._number) == Job("COMPLETED", ExitCode.DONE, 0), self.said
        whole = self.run / "whole"
        pool.run(run_as_rank, 1, self.run / "tiny.yaml", [[*in_run(str(whole)), *self._keys]])
        pairs = zip(steps(self._folder), steps(whole), strict=True)
        assert max(abs(mine[1] - other[1]) for mine, other in pairs) < 1e-10


def test_a_node_that_fails_does_not_end_the_job(slurm: Slurm, tmp_path: Path, pool: Pool) -> None:
    job = ElasticJob(slurm, tmp_path, ["--nodes", "2"])
    job.lose(2, 3)
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=lost")
    job.assert_done(pool)
    assert (
        "> lost processes: 2, 3; training goes on from iteration" in job.said and "> done: ranks were lost" in job.said
    )


def test_a_process_of_a_spare_node_takes_a_lost_place(slurm: Slurm, tmp_path: Path, pool: Pool) -> None:
    """Two ranks compute a sample each of a batch of two, so that those of the other node can only replace them."""
    job = ElasticJob(slurm, tmp_path, ["--nodes", "1", "--spares", "1"], [*KEYS, "train.global_batch_size=2"])
    slurm.until(lambda: job.said.count("waits to join") == 2, lambda: job.said)
    job.lose(1)
    job.assert_done(pool)
    assert "> lost processes: 1; joined: 2, 3; training goes on" in job.said and "on 2 ranks, data=2" in job.said
