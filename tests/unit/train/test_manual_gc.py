"""Fact: with `train.loop` Python collects garbage at the configured iterations only, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from megatron3d.config.schema import TrainConfig
from megatron3d.train.loop import ManualGc


def collections(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the iterations after which garbage was collected; 0 is the start."""
    found: list[int] = []
    iteration = 0
    monkeypatch.setattr(gc, "collect", lambda: found.append(iteration))
    with ManualGc(config) as collector:
        assert gc.isenabled() is not config.manual_gc
        assert (gc.get_freeze_count() > 0) is config.manual_gc
        for iteration in range(1, 10):
            collector.after_step(iteration)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    return found


@pytest.mark.parametrize(("interval", "expected"), [(0, [0]), (4, [0, 4, 8])])
def test_garbage_is_collected_at_the_interval(
    monkeypatch: pytest.MonkeyPatch, interval: int, expected: list[int]
) -> None:
    """Catches a collection in every step, and a collector that stays off after the run."""
    assert collections(TrainConfig(manual_gc=True, manual_gc_interval=interval), monkeypatch) == expected


def test_by_default_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collections(TrainConfig(), monkeypatch) == []
