"""Fact: the stacks of a rank can be read 100,000 times while it trains: autograd's and gloo's threads come and go."""

from __future__ import annotations

import signal
from pathlib import Path

from megatron3d.errors import ExitCode
from tests.support.tiny_run import launch_ranks, write_config

NUM_READS = 100_000
PROGRAM = f"""
import os, sys, threading, time
from megatron3d.runtime import process, watchdog
import pretrain_gpt

def read(main):
    num_reads = 0
    while num_reads < {NUM_READS} or os.environ["RANK"] != "0":
        watchdog.program_stack(main)
        num_reads += 1
        time.sleep(0)  # lets the step go on
    print("reads done", flush=True)
    os.kill(os.getpid(), {int(signal.SIGTERM)})  # a stop on request

follow = watchdog.Watchdog.follow
def follow_and_read(self, *arguments, **others):
    follow(self, *arguments, **others)
    threading.Thread(target=read, args=(threading.get_ident(),), daemon=True).start()
watchdog.Watchdog.follow = follow_and_read
sys.exit(process.run_program(pretrain_gpt.main))
"""


def test_a_hundred_thousand_reads_do_no_harm(tmp_path: Path) -> None:
    """Bug that this finds: faulthandler walks the threads without CPython's lock; ranks ended after 20,000 reads."""
    (tmp_path / "reads.py").write_text(PROGRAM)
    keys = ["parallel.tensor_parallel_mode=1d", "parallel.tensor_model_parallel_size=2", "train.train_iters=1000000"]
    keys += ["checkpoint.save=null", "checkpoint.load=null", "optimizer.lr=1e-4", "logging.log_interval=20"]
    ranks = launch_ranks([str(tmp_path / "reads.py"), "--config", str(write_config(tmp_path)), *keys], 2)
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.STOPPED] * 2, outputs
    assert "reads done" in outputs[0][0] and "iteration       20/" in outputs[0][0]
