"""Fact: no wait for a rank outlasts the loss of it, also where gloo forgets a send, and errors are those of gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime import waits
from megatron3d.runtime.process import fake_world
from megatron3d.runtime.waits import LOSSES, GivenUp, GlooWork, wait_for_collective, wait_for_transfer
from tests.support.tiny_run import launch_ranks

WAITS = [wait_for_collective, wait_for_transfer]
Wait = Callable[[GlooWork], None]
# Rank 1 takes part, and stops before it has read all; then rank 0 ends its connections, as when ranks are lost.
PROGRAM = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from megatron3d.runtime import members
from megatron3d.runtime.connections import open_sockets, shut_down
from megatron3d.runtime.waits import LOSSES, GivenUp, wait_for_collective, wait_for_transfer

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, x, other = dist.get_rank(), torch.zeros(1 << 24), torch.tensor([os.getpid()])
dist.broadcast(other, src=1)

def start():
    if kind != "transfer":
        return dist.broadcast(x, src=0, async_op=True)
    return dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)

if rank == 1:
    work = start()
    time.sleep(100)
lost = threading.Event()
LOSSES.is_lost = lost.is_set
time.sleep(1)
os.kill(int(other), signal.SIGSTOP)
work = start()
if kind != "transfer":
    LOSSES.start(work)

def lose():
    time.sleep(1)
    lost.set()
    shut_down({*open_sockets()}, ())

threading.Thread(target=lose).start()
try:
    if kind == "in flight":
        lost.wait()
        raise GivenUp("a wait for a rank was given up to be here")
    (wait_for_collective if kind == "collective" else wait_for_transfer)(work)
except GivenUp as error:
    print(error)
members._destroy_groups()
os.kill(int(other), signal.SIGKILL)
"""


class FakeWork:
    """Work that is completed at a time, or never, with an error or without."""

    def __init__(self, at_s: float, error: Exception | None = None) -> None:
        self._at_s, self._error = time.monotonic() + at_s, error

    def is_completed(self) -> bool:
        return time.monotonic() >= self._at_s

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        time.sleep(max(0.0, min(timeout.total_seconds(), self._at_s - time.monotonic())))
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise self._error
        return True


@pytest.fixture(autouse=True)
def no_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waits, "POLL", timedelta(seconds=0.05))
    monkeypatch.setattr(LOSSES, "is_lost", lambda: False)
    monkeypatch.setattr(waits, "SETTLE_S", 0.3)
    yield
    LOSSES.forget()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("at_s", [0.0, 0.2])
def test_a_wait_lasts_as_long_as_its_work(wait: Wait, at_s: float) -> None:
    begin = time.monotonic()
    wait(FakeWork(at_s))
    assert time.monotonic() - begin >= at_s and not LOSSES.has_given_up
    with pytest.raises(ConnectionError, match="closed by peer"):
        wait(FakeWork(at_s, ConnectionError("closed by peer")))


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_given_up_once_ranks_are_lost(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_at_s = time.monotonic() + 0.2
    monkeypatch.setattr(LOSSES, "is_lost", lambda: time.monotonic() > lost_at_s)
    with pytest.raises(GivenUp):
        wait(FakeWork(5.0))
    assert time.monotonic() > lost_at_s and LOSSES.has_given_up


def test_a_collective_that_is_completed_as_the_wait_times_out_is_done() -> None:
    class Late(FakeWork):
        def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
            if timeout < timedelta(days=1):
                raise RuntimeError("Operation timed out!")
            return super().wait(timeout)

    wait_for_collective(Late(0.0))


def test_collectives_are_idle_once_all_have_ended() -> None:
    assert LOSSES.is_idle()
    LOSSES.start(FakeWork(0.1))
    LOSSES.start(FakeWork(0.0))
    assert LOSSES.is_idle(), "they end in a moment"
    LOSSES.start(FakeWork(5.0))
    LOSSES.start(FakeWork(0.0))
    assert not LOSSES.is_idle()
    LOSSES.forget()
    assert LOSSES.is_idle()


def test_collectives_over_gloo_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh((("data", 2),), 0)
    with fake_world(0, 2):
        comm, noted = ProcessComm(mesh, [("data",)]), list[GlooWork]()
        monkeypatch.setattr(LOSSES, "start", noted.append)
        comm.all_reduce(torch.ones(2), ("data",)).wait()
    assert len(noted) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collective", "in flight", "transfer"])
def test_a_send_that_gloo_forgets_is_given_up_and_the_process_ends(tmp_path: Path, kind: str) -> None:
    """Without that the wait, and the end of the group or the process, would last for half an hour, torch's timeout."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ranks = launch_ranks([str(path), kind], 2)
    try:
        out, errors = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "a wait for a rank was given up" in out and ranks[0].returncode == 0, errors
