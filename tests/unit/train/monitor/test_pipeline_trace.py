"""Fact: a trace has every computation of the schedule once, in schedule order and without its waiting times.

The predicted timeline is next to the measured one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from torch import Tensor

from megatron3d.comm.interface import Pending
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.errors import ExitCode
from megatron3d.parallel.mesh import Link, Mesh
from megatron3d.pipeline.actions import Action, ActionKind, Costs, Schedule, parse_action
from megatron3d.pipeline.engine import ActivationTransfer, Engine
from megatron3d.pipeline.schedules import SCHEDULES, build_schedule
from megatron3d.pipeline.simulate import Timeline, simulate, simulate_mean_durations
from megatron3d.train.monitor.profiling import TraceRecorder
from tests.support.pool import Pool
from tests.support.tiny_run import in_run, run, run_as_rank, write_config

CPU = torch.device("cpu")
ALONE = ProcessComm(Mesh((("pipeline", 1), ("data", 1)), 0), ())
WAIT_S = 0.2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("trace"))


@given(name=st.sampled_from(list(SCHEDULES)), p=st.integers(1, 4), m=st.integers(1, 8), scale=st.floats(0.1, 10))
def test_a_run_as_simulated_has_the_predicted_time(name: str, p: int, m: int, scale: float) -> None:
    schedule = build_schedule(name, p, m)
    measured = simulate(schedule, Costs(F=scale, I=1.5, W=1, B=2.5))
    assert simulate_mean_durations(schedule, measured).makespan == pytest.approx(measured.makespan)


def test_the_prediction_takes_the_mean_of_each_stage_and_kind() -> None:
    """If every second forward takes twice as long, the predicted forward takes one and a half times as long."""
    schedule = build_schedule("1f1b", 2, 4)
    spans = simulate(schedule, Costs(F=1, B=2)).spans
    uneven = [
        s._replace(end=s.end + 1)
        if s.action.kind is ActionKind.F and s.action.stage == 1 and (s.action.mb or 0) % 2
        else s
        for s in spans
    ]
    lengths = {
        (s.action.kind, s.action.stage): s.end - s.start
        for s in simulate_mean_durations(schedule, Timeline((*uneven,))).spans
    }
    assert lengths == pytest.approx(
        {(ActionKind.F, 0): 1, (ActionKind.F, 1): 1.5, (ActionKind.B, 0): 2, (ActionKind.B, 1): 2}
    )


class SlowTransfer(ActivationTransfer):
    """Communicator whose receives take long to arrive and whose sends do nothing."""

    def receive(self, link: Link) -> Pending:
        def wait() -> Tensor:
            time.sleep(WAIT_S)
            return torch.ones(self.shape)

        return Pending(wait)


class Deaf(ProcessComm):
    """Communicator of a single process whose links lead nowhere."""

    def send(self, x: Tensor, link: Link) -> Pending:
        return Pending(lambda: x)


def test_waiting_for_a_receive_is_not_computing() -> None:
    """A rank between two others receives every tensor that it computes on."""
    comm = Deaf(ALONE.mesh, ())
    transfer = SlowTransfer((2, 2), torch.float32, CPU, (), comm)
    weight = torch.ones(2, 2, requires_grad=True)

    def compute(stage: int, x: Tensor | None, mb: int) -> Tensor:
        assert x is not None, "it has arrived"
        return x @ weight

    actions = [parse_action(text) for text in ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"]]
    Engine(actions, (0, 1, 2), compute, transfer).run()  # torch's imports at the first call take long as well
    recording = TraceRecorder(comm, CPU)
    Engine(actions, (0, 1, 2), compute, transfer).run(recording.observe)
    forward, backward = recording.spans()
    assert [str(forward.action), str(backward.action)] == ["1F0", "1B0"]
    assert forward.start >= 1e3 * WAIT_S and backward.start - forward.end >= 1e3 * WAIT_S
    assert max(span.end - span.start for span in (forward, backward)) < 1e3 * WAIT_S / 2


def test_one_rank_per_pipeline_rank_is_recorded() -> None:
    counted = []
    for rank in range(8):
        recording = TraceRecorder(NoBarrier(Mesh((("pipeline", 2), ("data", 2), ("t", 2)), rank), ()), CPU)
        with recording.observe(Action(ActionKind.F, rank // 4, 0)):
            pass
        counted += [(rank, span.rank) for span in recording.spans()]
    assert counted == [(0, 0), (4, 1)]


class Event:
    """Device clock whose events happen long after they were recorded, one per second."""

    now_s = 0.0
    calls: list[str]

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing and device.type == "meta"

    def record(self) -> None:
        Event.now_s, self.at_s = Event.now_s + 1, Event.now_s
        Event.calls.append("record")

    def synchronize(self) -> None:
        Event.calls.append("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_on_a_device_events_are_read_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    Event.calls = []
    recording = TraceRecorder(ALONE, torch.device("meta"))
    actions = [Action(ActionKind.F, 0, 0), Action(ActionKind.B, 0, 0)]
    for action in actions:
        with recording.observe(action):
            pass
    assert Event.calls == ["record"] * 5
    assert recording.spans() == [(0, actions[0], 1000, 2000), (0, actions[1], 3000, 4000)]
    assert "synchronize" in Event.calls


class NoBarrier(ProcessComm):
    """Communicator of a rank in a world without other ranks."""

    def _make_group(self, axes: tuple[str, ...]) -> None:
        return None

    def barrier(self) -> None:
        pass


def spans_of(events: list[dict[str, Any]], title: str) -> list[list[dict[str, Any]]]:
    """Return by rank the spans of the timeline whose title starts with `title`."""
    (pid,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith(title))
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
    return [[e for e in spans if e["tid"] == rank] for rank in sorted({e["tid"] for e in spans})]


def check_trace(path: Path, schedule: Schedule) -> None:
    """Check the three files of an iteration."""
    events = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    for title in ("predicted", "measured"):
        ranks = spans_of(events, title)
        assert [[e["name"] for e in sorted(spans, key=lambda e: e["ts"])] for spans in ranks] == [
            [str(action) for action in actions] for actions in schedule
        ]
        for spans in ranks:
            ordered = sorted(spans, key=lambda e: e["ts"])
            ends = [before["ts"] + before["dur"] for before in ordered[:-1]]
            assert all(end <= after["ts"] + 1e-3 for end, after in zip(ends, ordered[1:], strict=True))
            assert all(e["dur"] > 0 for e in ordered)
    assert imread(path.with_suffix(".png")).shape[2] == 4
    assert ElementTree.parse(path.with_suffix(".svg")).getroot().tag.endswith("svg")


PIPELINES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def test_two_ranks_write_traces_of_the_configured_iterations(config: Path, pool: Pool) -> None:
    common = ["model.num_layers=4", "parallel.pipeline_model_parallel_size=2", "logging.trace_iterations=[2]"]
    runs = [
        [*in_run(str(config.parent / name)), *common, f"parallel.pipeline_schedule={name}", "train.train_iters=3"]
        for name in PIPELINES
    ]
    assert pool.run(run_as_rank, 2, config, runs) == [[ExitCode.DONE] * len(runs)] * 2
    for name, virtual in PIPELINES.items():
        folder = config.parent / name / "traces"
        assert {path.name for path in folder.iterdir()} == {f"iter_0000002.{kind}" for kind in ("json", "png", "svg")}
        check_trace(folder / "iter_0000002", build_schedule(name, 2, 4, virtual))


def test_bubbles_are_reported_without_a_pipeline(config: Path) -> None:
    outcome = run(config, *in_run(str(config.parent / "alone")), "train.train_iters=2", "logging.trace_iterations=[2]")
    assert outcome.code == ExitCode.DONE, outcome.err
    (line,) = (line for line in outcome.out.splitlines() if "trace of" in line)
    assert re.fullmatch(r"> trace of iteration 2: bubble measured \d+\.\d %, predicted 0\.0 %", line)
    check_trace(config.parent / "alone" / "traces" / "iter_0000002", build_schedule("1f1b", 1, 4))


IN_THE_WAY: dict[str, tuple[Callable[[Path], object], tuple[str, ...], bool]] = {
    "a file for the folder": (
        lambda folder: (folder / "traces").write_text(""),
        ("checkpoint.save=", "traces: cannot be created", "use a folder that you own"),
        False,
    ),
    "a folder for a file": (
        lambda folder: (folder / "traces" / "iter_0000002.json").mkdir(parents=True),
        ("> WARNING: the trace is lost: ", "iter_0000002.json cannot be written: Is a directory"),
        True,
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_trace_that_cannot_be_written_is_reported_and_ends_no_run(config: Path, name: str) -> None:
    put, words, trains = IN_THE_WAY[name]
    folder = config.parent / name.replace(" ", "-")
    folder.mkdir()
    put(folder)
    outcome = run(config, *in_run(str(folder)), "train.train_iters=2", "logging.trace_iterations=[2]")
    assert ("iteration        2/" in outcome.out) == trains
    assert outcome.code == (ExitCode.DONE if trains else ExitCode.USER_ERROR) and "Traceback" not in outcome.err
    (message,) = [line for line in outcome.out.splitlines() if "WARN" in line] if trains else outcome.err.splitlines()
    assert [word for word in words if word not in message] == []
