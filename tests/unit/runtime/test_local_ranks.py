"""Fact: ranks on this machine get the launcher's signals, end together, and their exit code is the launcher's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron3d.errors import ExitCode
from megatron3d.runtime.local_ranks import reserved_port
from tests.support.processes import start
from tests.support.tiny_run import ROOT

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def wait():
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} waits\\n".encode())
    for _ in range(1200):  # not one long sleep: a signal just before it is handled only after it
        time.sleep(0.05)
def stop(*_):
    time.sleep(rank)
    sys.exit(3)
"""


def launch(folder: Path, body: str, *words: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK + body)
    command = [sys.executable, "-m", "megatron3d.runtime.local_ranks", str(folder / "rank.py"), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return start(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("", ExitCode.DONE, ""),
        ("sys.exit(3 * rank)", ExitCode.STOPPED, ""),
        ("sys.exit(2) if rank == 1 else wait()", ExitCode.USER_ERROR, ""),
        ("os.kill(os.getpid(), 9) if rank == 1 else wait()", 128 + 9, "> rank 1 was killed by SIGKILL\n"),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, error: str) -> None:
    began = time.monotonic()
    ranks = launch(tmp_path, body, "02")
    _, err = ranks.communicate(timeout=30)
    assert (ranks.returncode, err) == (code, error)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_which_may_take_its_time(tmp_path: Path, number: signal.Signals) -> None:
    ranks = launch(tmp_path, f"signal.signal({int(number)}, stop)\nwait()", "2")
    assert ranks.stdout is not None, "it is piped"
    assert {ranks.stdout.readline() for _ in range(2)} == {"rank 0 of 2 waits\n", "rank 1 of 2 waits\n"}
    ranks.send_signal(number)
    _, err = ranks.communicate(timeout=30)
    assert (ranks.returncode, err) == (ExitCode.STOPPED, "")


@pytest.mark.parametrize("number", ["0", "1025", "9" * 400])
def test_absurd_numbers_are_refused(tmp_path: Path, number: str) -> None:
    ranks = launch(tmp_path, "", number)
    _, err = ranks.communicate(timeout=30)
    assert ranks.returncode == ExitCode.USER_ERROR
    assert err == f"{number} ranks: this launcher starts 1 to 1024 on this machine; use 2, for example\n"


def test_a_port_is_held_until_the_ranks_end() -> None:
    """Rank 0 listens on it, and a second launch, which looks before rank 0 listens, is given another."""
    with reserved_port() as port:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("localhost", port))
        store = dist.TCPStore("localhost", port, 1, is_master=True, multi_tenant=True)  # type: ignore[attr-defined]
        store.set("key", "value")
        assert store.get("key") == b"value"
