"""Fact: a launch with fewer ranks than the layout needs goes on in another layout, with the losses of all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron3d.errors import ExitCode, UserError
from megatron3d.forecast.search.restart import resolve_elastic
from megatron3d.runtime.process import Runtime
from megatron3d.runtime.program import StartupPhases, StopSignal
from megatron3d.train.build import build_run
from megatron3d.train.loop import train
from tests.support.pool import Pool
from tests.support.processes import start
from tests.support.slurm import free_ports
from tests.support.tiny_run import ROOT, in_run, run_as_rank, steps, write_config

LAYOUT = ["parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=2", "train.precision=fp64"]
ELASTIC = [*LAYOUT, "train.elastic=true"]


def launch(rank: int, world_size: int, config: Path, typed: list[str]) -> tuple[str | None, int]:
    resolved, changed = resolve_elastic(config, typed, world_size)
    run = build_run(resolved, Runtime(rank, world_size, rank, torch.device("cpu")), StartupPhases(printing=False))
    try:
        train(run, StopSignal())
    finally:
        run.close()
    return changed, resolved.config.train.global_batch_size


def test_a_restart_with_fewer_ranks_plans_another_layout(pool: Pool, tmp_path: Path) -> None:
    """Eight ranks train four steps, four go on: every loss is that of eight ranks to 1e-10."""
    config = write_config(tmp_path)
    whole, parted = ([*in_run(f"{tmp_path}/{name}"), *ELASTIC] for name in ("whole", "parted"))
    pool.run(run_as_rank, 8, config, [whole, [*parted, "train.exit_interval=4"]])
    results = pool.run(launch, 4, config, parted)
    ((changed, batch),) = {*results}
    assert changed is not None and batch == 16
    assert changed.startswith("the configured layout needs 8 ranks (1d ") and "pipeline=2" in changed
    assert "this launch has 4: " in changed and changed.endswith("times as long, if it scales with the ranks")
    expected, found = steps(tmp_path / "whole"), steps(tmp_path / "parted")
    assert [step[0] for step in found] == [step[0] for step in expected] == list(range(1, 9))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[1:] == pytest.approx(theirs[1:], rel=1e-10, abs=0)


# A step takes long enough for a node to be lost before the last one.
SLOW = """
import sys, time
import pretrain_gpt
from megatron3d.runtime import process
from megatron3d.train import loop

step = loop.train_step
loop.train_step = lambda *args, **named: (time.sleep(0.5), step(*args, **named))[1]
sys.exit(process.run_program(pretrain_gpt.main))
"""


def start_node(port: int, *program: str) -> subprocess.Popen[str]:
    """Start torchrun as on one of one or two nodes, with two ranks."""
    typed = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=nodes"]
    typed += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=10,keep_alive_interval=1"]
    environ = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return start(
        [sys.executable, "-m", "torch.distributed.run", *typed, *program],
        cwd=ROOT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_torchrun_goes_on_with_the_nodes_that_are_left(pool: Pool, tmp_path: Path) -> None:
    """The agent and the ranks of one of two nodes are killed: the other starts its ranks in another layout."""
    config, slow = write_config(tmp_path), tmp_path / "slow.py"
    slow.write_text(SLOW)
    keys = ["train.precision=fp64", "parallel.tensor_model_parallel_size=4", "train.train_iters=12"]
    typed = [*in_run(str(tmp_path / "parted")), *keys, "checkpoint.save_interval=2", "train.elastic=true"]
    (port,) = free_ports(1)
    first = start_node(port, str(slow), "--config", str(config), *typed)
    time.sleep(2)  # it serves the rendezvous
    second = start_node(port, str(slow), "--config", str(config), *typed)
    journal = tmp_path / "parted" / "metrics.jsonl"
    while not journal.exists() or len(steps(journal.parent)) < 5:
        assert first.poll() is None
        time.sleep(0.1)
    ranks = subprocess.run(["pgrep", "-P", str(second.pid)], capture_output=True, text=True, check=True).stdout.split()
    for process in (second.pid, *map(int, ranks)):
        os.kill(process, signal.SIGKILL)
    text, _ = first.communicate(timeout=150)
    second.communicate()
    assert first.returncode == ExitCode.DONE, text
    assert "the configured layout needs 4 ranks" in text and "this launch has 2: 1d t=2" in text
    pool.run(run_as_rank, 4, config, [[*in_run(str(tmp_path / "whole")), *keys]])
    found = {iteration: loss for iteration, loss, _ in steps(tmp_path / "parted")}
    for iteration, loss, _ in steps(tmp_path / "whole"):
        assert found[iteration] == pytest.approx(loss, rel=1e-10, abs=0)


def test_a_layout_that_fits_is_the_configured_one(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    resolved, changed = resolve_elastic(config, ELASTIC, 8)
    assert changed is None and resolved.config.parallel.tensor_model_parallel_size == 4


def test_what_is_wrong_stays_wrong(tmp_path: Path) -> None:
    """Without the key, or with another mistake, nothing is planned; ranks that no layout uses are named."""
    config = write_config(tmp_path)
    with pytest.raises(UserError, match=r"world_size|ranks"):
        resolve_elastic(config, LAYOUT, 4)
    with pytest.raises(UserError, match=r"data\.data_path"):
        resolve_elastic(config, [*ELASTIC, "data.data_path=absent"], 4)
    with pytest.raises(UserError, match=r"train\.elastic=true: no layout near .* uses all of 7 ranks .*; start [46]"):
        resolve_elastic(config, ELASTIC, 7)
