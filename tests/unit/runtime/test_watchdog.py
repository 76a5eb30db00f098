"""Fact: a rank without progress ends in time, whatever the store of heartbeats or the console does."""

from __future__ import annotations

import _thread
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.runtime import watchdog
from megatron3d.runtime.heartbeat import CollectiveStatus
from megatron3d.runtime.watchdog import Silence, Suspicion, Watchdog, program_stack
from tests.unit.runtime.test_heartbeat import FIRST

pytestmark = pytest.mark.slow  # each waits for seconds


class HungStore:
    """Store whose process is stopped from some call on."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers, self.released = num_answers, threading.Event()

    def _call(self) -> None:
        self.num_answers -= 1
        if self.num_answers < 0:
            self.released.wait(60)

    def set(self, key: str, text: str) -> None:
        self._call()

    def get(self, key: str) -> str | None:
        self._call()
        return None

    def claim(self, key: str) -> bool:
        self._call()
        return True

    def count(self, key: str, more: int) -> int:
        self._call()
        return more


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for threads that still report at the end: their lines would be another test's errors."""
    before = threading.enumerate()
    monkeypatch.setattr(watchdog, "REPORT_INTERVALS", 2)
    yield
    for thread in threading.enumerate():
        if thread not in before and not isinstance(thread, threading._DummyThread):
            thread.join(10)


def ended(store: HungStore) -> bool:
    """Return whether a rank without progress for half a second ends within ten."""
    end = threading.Event()
    with Watchdog(store, 1, 2, 0.5, end.set):
        try:
            return end.wait(10)
        finally:
            store.released.set()


@pytest.mark.parametrize("num_answers", [0, 1, 2, 3, 4])
def test_a_store_that_hangs_does_not_keep_a_rank(num_answers: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(HungStore(num_answers))
    assert "rank 1: no progress for 0 s, and rank 0's process, which keeps the heartbeats, does not answer" in (
        capsys.readouterr().err
    )


def test_a_console_that_hangs_does_not_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HungStore(0)
    monkeypatch.setattr(watchdog, "print", lambda *_, **__: store.released.wait(60), raising=False)
    assert ended(store)


def test_progress_keeps_a_rank() -> None:
    """The line of the main thread that waits does not change, so the count of collectives shows the progress."""
    end, begin = threading.Event(), time.monotonic()
    with Watchdog(HungStore(10**6), 1, 2, 1.5, end.set) as watch:
        watch.follow(lambda: 1, lambda: CollectiveStatus(int(10 * (time.monotonic() - begin)), "all_reduce"))
        assert not end.wait(3)


@pytest.mark.parametrize("who", ["this rank", "another rank"])
def test_bytes_of_a_checkpoint_are_progress_of_every_rank(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: ranks that wait for a slow disk end all, also those that wait for another rank's."""
    end, begin, store = threading.Event(), time.monotonic(), HungStore(10**6)

    def written() -> int:
        return int(10 * (time.monotonic() - begin))

    if who == "another rank":
        monkeypatch.setattr(store, "count", lambda key, more: written() + more)
    with Watchdog(store, 1, 2, 1.5, end.set) as watch:
        watch.follow(lambda: 1, lambda: CollectiveStatus(3, "all_reduce"))
        watch.follow_saves(written if who == "this rank" else lambda: 0)
        assert not end.wait(3)


def test_stacks_are_read_only_while_the_counters_stand_still() -> None:
    """Bug that this finds: four reads a second for weeks, each a risk, though a run that goes on needs none."""
    reads: list[int] = []
    suspicion = Suspicion(10.0, lambda: (reads.append(1), (f"loop.py:{len(reads) // 3} load",))[1])
    found = [suspicion.is_progress((now_s, 0), float(now_s)) for now_s in range(100)]
    assert all(found) and not reads and suspicion.stack is None
    found = [suspicion.is_progress((99, 0), 99.0 + now_s) for now_s in range(10)]
    assert not any(found) and not reads
    found = [suspicion.is_progress((99, 0), 109.0 + now_s) for now_s in range(6)]
    assert found == [False, False, True, False, False, True] and len(reads) == 6
    assert suspicion.stack == ("loop.py:2 load",)
    assert suspicion.is_progress((100, 0), 115.0) and suspicion.stack is None


def test_a_silence_and_its_end_are_said_once() -> None:
    """Bug that this finds: a silent rank is named at every heartbeat, or never since the text is compared by time."""
    silence = Silence(4, 20.0)
    texts = [json.dumps(asdict(replace(FIRST, sequence=number))) for number in (1, 2, 3)]
    heard = [(0, texts[0]), (5, texts[1]), (15, texts[1]), (24, texts[1]), (25, texts[1]), (30, texts[1])]
    heard += [(60, texts[2]), (61, texts[2])]
    said = [(now_s, message) for now_s, text in heard if (message := silence.hear(text, now_s))]
    assert [now_s for now_s, _ in said] == [25, 60]
    assert said[0][1].startswith("rank 4 has sent no heartbeat for 20 s (host node1, process 10); before that after ")
    assert said[1][1] == "rank 4 answers again, after 55 s"


def test_the_stack_goes_on_in_the_thread_of_the_backward() -> None:
    """Bug that this finds: a rank that waits in the backward of a GPU is taken for one outside of any collective."""
    begun, end, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> Tensor:
        begun.set()
        end.wait(10)
        return torch.empty(0)

    def backward() -> None:
        Pending(wait).wait()
        ended.set()

    _thread.start_new_thread(backward, ())
    assert begun.wait(10)
    stack = program_stack(threading.get_ident())
    end.set()
    assert ended.wait(10)
    assert len(stack) == 1 and stack[0].startswith("comm/interface.py:") and stack[0].endswith(" wait")


def test_threads_of_the_loader_are_not_the_backward() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> Tensor:
        begun.set()
        end.wait(10)
        return torch.empty(0)

    loader = threading.Thread(target=lambda: Pending(wait).wait())
    loader.start()
    assert begun.wait(10) and program_stack(threading.get_ident()) == ()
    end.set()
    loader.join()


def test_a_rank_that_never_sent_a_heartbeat_is_silent() -> None:
    silence = Silence(4, 20.0)
    assert silence.hear(None, 0) is None
    assert silence.hear(None, 30) == "rank 4 has sent no heartbeat for 30 s since it began"


def test_each_rank_listens_to_the_next_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.0)
    monkeypatch.setattr(watchdog, "LISTENED_INTERVALS", 0)
    with Watchdog(HungStore(10**6), 1, 3, 60, lambda: None):
        time.sleep(1.2)
    assert capsys.readouterr().err.count("> watchdog: rank 2 has sent no heartbeat for ") == 1


@pytest.mark.parametrize("trace", [b"entries", b""])
def test_the_trace_of_collectives_is_written_before_the_end(trace: bytes, tmp_path: Path) -> None:
    """Bug that this finds: the trace is written after the report, when the launcher has ended the rank."""
    end = threading.Event()
    store = HungStore(10**6)
    with Watchdog(store, 1, 2, 0.5, end.set, lambda: trace) as watch:
        watch.follow(lambda: 1, CollectiveStatus, tmp_path)
        assert end.wait(10)
    path = tmp_path / "flight_recorder" / "rank_1"
    assert (path.read_bytes() == trace) if trace else not path.exists()


def test_a_trace_that_hangs_does_not_keep_a_rank(tmp_path: Path) -> None:
    end, released = threading.Event(), threading.Event()

    def hang() -> bytes:
        released.wait(60)
        return b""

    with Watchdog(HungStore(10**6), 1, 2, 0.5, end.set, hang) as watch:
        watch.follow(lambda: 1, CollectiveStatus, tmp_path)
        assert end.wait(10)
    released.set()
