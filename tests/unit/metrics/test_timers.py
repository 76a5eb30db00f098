"""Fact: times of phases add up on the clock that they are read from, and no step waits for a device to be timed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.metrics import timers
from megatron3d.metrics.timers import BACKWARD, BATCH, COMPUTES, EVALUATE, FORWARD, SCHEDULE, Spread, Timers, own_ms
from megatron3d.pipeline.actions import Action, ActionKind, Costs
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import simulate

CPU = torch.device("cpu")
F0, B0, W0, SEND = (Action(kind, 0, 0) for kind in (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.SEND_F))


class Hands:
    """Clock that is set by hand, in milliseconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        patch.setattr(timers.time, "perf_counter", lambda: self.now_ms / 1e3)  # type: ignore[attr-defined]

    def move(self, ms: float) -> None:
        self.now_ms += ms


def one_step(timed: Timers, hands: Hands) -> None:
    with timed.observe(BATCH):
        hands.move(2)
    with timed.observe(SCHEDULE):
        for what, ms in ((F0, 3), (SEND, 100), (B0, 5), (W0, 7)):
            with timed.observe(what):
                hands.move(ms)
        with timed.waiting(("x", "y")):
            hands.move(11)
    timed.end_step()


def test_phases_of_steps_and_times_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(monkeypatch)
    timed = Timers(CPU)
    one_step(timed, hands)
    timed.discard_steps()
    for _ in range(2):
        one_step(timed, hands)
        with timed.between_steps(EVALUATE), timed.observe(BATCH), timed.waiting(("x",)):
            hands.move(20)
    expected = {BATCH: 2, SCHEDULE: 126, FORWARD: 3, BACKWARD: 12, "along x·y": 11, EVALUATE: 40}
    times = timed.take(num_steps=2)
    assert times == pytest.approx(expected) and timed.take(1) == {}
    assert own_ms(times) == pytest.approx(2 + 126 - 11)
    off = Timers(CPU, is_off=True)
    one_step(off, hands)
    with off.between_steps(EVALUATE):
        one_step(off, hands)
    one_step(off, hands)
    assert off.take(1).keys() <= {EVALUATE}


class Event:
    """Device event that completes when it is queried, and logs when that was."""

    log: list[str]

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing and device.type == "meta"

    def record(self) -> None:
        Event.log.append("record")

    def synchronize(self) -> None:
        Event.log.append("read")

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def test_device_events_are_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    Event.log = []
    timed = Timers(torch.device("meta"))
    for _ in range(3):
        with timed.observe(BATCH):
            pass
        timed.end_step()
    assert Event.log == ["record"] * 4 + ["read"] + ["record"] * 2 + ["read"]
    assert timed.take(num_steps=3) == {BATCH: 1.0}


@given(name=st.sampled_from(list(SCHEDULES)), p=st.integers(1, 4), m=st.integers(1, 8), forward=st.floats(0.1, 10))
def test_the_bubble_equals_the_timelines(name: str, p: int, m: int, forward: float) -> None:
    """Ranks start and end together, since the all-reduce after the schedule synchronizes them."""
    line = simulate(build_schedule(name, p, m), Costs(F=forward, I=1.5, W=1, B=2.5))
    nothing = Spread(0.0, 0.0, 0, 0.0)
    busy = sum(span.end - span.start for spans in line.rank_spans for span in spans) / p
    phases = {FORWARD: nothing._replace(mean=busy), BACKWARD: nothing}
    whole = Spread(line.makespan, line.makespan, 0, line.makespan)
    assert timers.pipeline_bubble({SCHEDULE: whole, **phases}) == pytest.approx(line.idle_rate, abs=1e-9)
    assert timers.pipeline_bubble({SCHEDULE: nothing, **dict.fromkeys(COMPUTES, nothing)}) is None
