"""Fact: a rank's timers record the same parts as a prediction, and the parts and their sum are comparable."""

from __future__ import annotations

import pytest

from megatron3d.linear.overlap_plan import ExposedComm
from megatron3d.train.monitor.monitor import parts_of

PHASES = {
    "batch-generator": 0.1,
    "forward-backward": 5.0,
    "forward-compute": 1.5,
    "backward-compute": 2.5,
    "all-grads-sync": 0.5,
    "optimizer": 0.3,
    ExposedComm(("t",)): 1.2,
    ExposedComm(("data",)): 0.4,
    ExposedComm(("pipeline",)): 0.8,
}


def test_phases_and_predicted_parts_have_the_same_sum() -> None:
    parts = parts_of(PHASES)
    assert parts.total == pytest.approx(0.1 + 5.0 + 0.5 + 0.3)
    expected = {
        "computation": 2.9,
        ExposedComm(("t",)): 1.2,
        ExposedComm(("data",)): 0.4,
        "bubble": 1.0,
        "update": 0.3,
        "data": 0.1,
    }
    assert dict(parts) == pytest.approx(expected)


def test_without_timers_there_are_no_parts() -> None:
    assert parts_of({}) == {}
