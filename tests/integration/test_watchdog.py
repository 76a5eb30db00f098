"""Fact: a rank that dies, stops or blocks the others ends the run in time, and is named with its location."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron3d.errors import ExitCode
from megatron3d.runtime.watchdog import TRACES
from tests.support.tiny_run import ROOT, launch_ranks, write_config

HOLD = """
import os, sys, time
from megatron3d.runtime import process
from megatron3d.data.loader import PrefetchingLoader
import pretrain_gpt
step = PrefetchingLoader.step
def slow(self, first):
    if first >= 48 and os.environ["RANK"] == "1":
        time.sleep(1000)
    return step(self, first)
PrefetchingLoader.step = slow
sys.exit(process.run_program(pretrain_gpt.main))
"""

SLOW_DISK = """
import os, sys, time
from megatron3d.checkpoint import store
from megatron3d.runtime import process
import pretrain_gpt
raw_bytes, calls = store.raw_bytes, []
def slow(x):
    if os.environ["RANK"] == "1" and len(calls) < 24:
        calls.append(time.sleep(0.5))
    return raw_bytes(x)
store.raw_bytes = slow
sys.exit(process.run_program(pretrain_gpt.main))
"""


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_slow_save_ends_no_rank(tmp_path: Path, is_async: str) -> None:
    """Bug that this finds: all ranks end and leave a .tmp, while rank 1 writes for twice the timeout."""
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    keys = ["train.train_iters=4", "checkpoint.save_interval=2", f"checkpoint.async_save={is_async}"]
    keys += ["train.distributed_timeout_minutes=0.1"]
    ranks = launch_ranks([str(tmp_path / "slow.py"), "--config", str(write_config(tmp_path)), *keys], 2)
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.DONE] * 2, outputs
    assert (tmp_path / "run" / "iter_0000002").is_dir() and (tmp_path / "run" / "iter_0000004").is_dir()


def begin(config: Path, program: str, timeout_s: float) -> list[subprocess.Popen[str]]:
    """Start three ranks of an endless run and wait for three steps."""
    keys = ["train.train_iters=1000000", "checkpoint.load=null", "train.global_batch_size=12"]
    keys += [f"train.distributed_timeout_minutes={timeout_s / 60}", "train.micro_batch_size=1", "optimizer.lr=1e-4"]
    ranks = launch_ranks([program, "--config", str(config), *keys], 3)
    assert ranks[0].stdout is not None, "launch_ranks() pipes the output"
    assert any("iteration        3/" in line for line in ranks[0].stdout), ranks[0].communicate()[1]
    return ranks


def train_on(ranks: list[subprocess.Popen[str]]) -> None:
    """Wait until each rank has published a heartbeat with an iteration; two are half a second apart."""
    end = time.monotonic() + 1.5
    assert ranks[0].stdout is not None and any(time.monotonic() > end for _ in ranks[0].stdout)


def said(ranks: list[subprocess.Popen[str]], *blamed: int) -> str:
    """Return the messages of the other ranks, which must end with the exit code of a crash."""
    errors = {rank: ranks[rank].communicate(timeout=60)[1] for rank in range(3) if rank not in blamed}
    for rank in blamed:
        ranks[rank].kill()
        ranks[rank].communicate()
    assert {ranks[rank].returncode for rank in errors} == {ExitCode.CRASH}, errors
    return "".join(errors.values())


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_that_dies_is_named(tmp_path: Path, rank: int) -> None:
    """The message differs for rank 0, whose process keeps the heartbeats."""
    ranks = begin(write_config(tmp_path), "pretrain_gpt.py", timeout_s=600)
    train_on(ranks)
    began = time.monotonic()
    ranks[rank].kill()
    text = said(ranks, rank)
    assert time.monotonic() - began < 30
    assert "Traceback" not in text and text.count("ends, since another rank has ended: ") == 2, text
    if rank:
        assert f"> watchdog: rank {rank} does not answer (host " in text and text.count("does not answer") == 1
        assert f"process {ranks[rank].pid})" in text and "all_reduce over data" in text and "after iteration" in text
    else:
        assert "rank 0's process, which keeps the heartbeats, cannot be reached" in text


def test_a_stopped_rank_0_ends_the_run(tmp_path: Path) -> None:
    """It keeps the heartbeats, which the others can then neither write nor read."""
    ranks = begin(write_config(tmp_path), "pretrain_gpt.py", timeout_s=6)
    ranks[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    lines = said(ranks, 0).splitlines()
    assert time.monotonic() - began < 40
    blamed = "no progress for 6 s, and rank 0's process, which keeps the heartbeats, does not answer: it is stopped"
    assert [line for line in lines if blamed in line and line.startswith(("> watchdog: rank 1", "> watchdog: rank 2"))]


@pytest.mark.parametrize("how", ["stopped", "busy"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank outside of collectives is named with the group and the collective that it keeps waiting."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    (tmp_path / "hold.py").write_text(HOLD)
    program = str(tmp_path / "hold.py") if how == "busy" else str(ROOT / "pretrain_gpt.py")
    ranks = begin(write_config(tmp_path), program, timeout_s=6)
    if how == "stopped":
        train_on(ranks)
        ranks[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    text = said(ranks, *([1] if how == "stopped" else []))
    assert time.monotonic() - began < 40
    assert "no progress for 6 s" in text
    blame = "does not answer" if how == "stopped" else "keeps the others waiting"
    (line,) = [line for line in text.splitlines() if blame in line]
    assert line.startswith(f"> watchdog: rank 1 {blame} (host ") and "after iteration" in line
    assert how == "stopped" or "train/loop.py" in line
    assert "ranks 0, 2: after iteration" in text and "all_reduce over data" in text
    if how == "busy":
        assert re.search(
            r"> watchdog: rank 1 has started \d+ collectives over data, the last \w+; "
            r"ranks 0, 2 wait there for the \d+th, all_reduce\n",
            text,
        )
        folder = tmp_path / "run" / TRACES
        assert f"> watchdog: the last collectives of each rank, for torchfrtrace: {folder}\n" in text
        assert {path.name for path in folder.iterdir()} >= {"rank_0", "rank_2"}
        assert b"gloo:all_reduce" in (folder / "rank_0").read_bytes()
