"""Fact: a rank without progress ends in time, whatever the store of heartbeats or the console does."""

from __future__ import annotations

import threading
import time

import pytest

from megatron3d.runtime import watchdog
from megatron3d.runtime.watchdog import Watchdog


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


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "REPORT_INTERVALS", 2)


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
        watch.follow(lambda: 1, lambda: (int(10 * (time.monotonic() - begin)), ("all_reduce", ())))
        assert not end.wait(3)
