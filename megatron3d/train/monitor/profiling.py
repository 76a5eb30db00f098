"""torch.profiler for the configured iterations and ranks, written to `profiles` in the run's folder.

iter_0000010_rank0.json.gz      a Chrome trace, with the phases of the step and the pipeline's actions by name
iter_0000010_rank0.pickle       with record_memory_history: every allocation, for pytorch.org/memory_viz

Trace of one iteration of the pipeline: `traces/iter_0000010` as .json, .png and .svg in the run's folder.

barrier | F B F B ...      every rank records start and end of each computation, without the waiting before it
gather  | rank 0 simulates the schedule with the mean measured times, and draws measurement and simulation
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron3d.comm.interface import Comm
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config, LoggingConfig
from megatron3d.errors import UserError
from megatron3d.metrics.timers import clock
from megatron3d.model.router_state import is_first
from megatron3d.parallel.mesh import PIPELINE
from megatron3d.pipeline.actions import COMPUTATIONS, Action, ActionKind, Schedule
from megatron3d.pipeline.engine import Observer
from megatron3d.pipeline.simulate import Span, Timeline, simulate_mean_durations
from megatron3d.runtime.files import write_figure, write_text

# Folders in that of a run.
PROFILES, TRACES = "profiles", "traces"


def check_memory_history(logging: LoggingConfig, device: torch.device) -> None:
    """Raise UserError if `logging.record_memory_history` is set and the device is a CPU, which has no such history."""
    if logging.profile and logging.record_memory_history and device.type == "cpu":
        raise UserError(
            "logging.record_memory_history=true: this run computes on the CPU, whose allocator keeps no history; "
            "use false, or a GPU"
        )


class Profiler:
    """Profiler of one rank; does nothing unless `logging.profile` and `logging.profile_ranks` select the rank."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        logging, save = config.logging, config.checkpoint.save
        self._rank, self._device = rank, device
        self._has_memory_history = logging.record_memory_history
        is_selected = logging.profile and rank in logging.profile_ranks
        self._folder = Path(save) / PROFILES if save and is_selected else None
        end = min(logging.profile_step_end, RunSpec(config).train_iters + 1)
        self._iterations = range(logging.profile_step_start, end)
        self._profile: profile | None = None

    def begin_step(self, iteration: int, observer: Observer) -> Observer:
        """Return `observer`, which also names phases and actions in the profile if this iteration is profiled."""
        if self._folder is None or iteration not in self._iterations:
            return observer
        if self._profile is None:
            self._start()
        return nested(lambda what: record_function(str(what)), observer)

    def end_step(self, iteration: int) -> None:
        """Write the profile if this was the last profiled iteration."""
        if self._profile is not None and iteration + 1 not in self._iterations:
            self._write(self._profile, iteration)
            self._profile = None

    def _start(self) -> None:
        if self._has_memory_history:
            torch.get_device_module(self._device).memory._record_memory_history()
        on_device = [] if self._device.type == "cpu" else [ProfilerActivity.CUDA]
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()

    def _write(self, recorded: profile, iteration: int) -> None:
        """Write the profile; if that fails, print a warning and go on training."""
        recorded.stop()
        assert self._folder is not None, "a profiled run has a folder"
        path = self._folder / f"iter_{iteration:07d}_rank{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            if self._has_memory_history:
                memory = torch.get_device_module(self._device).memory
                memory._dump_snapshot(str(path.with_suffix("").with_suffix(".pickle")))
                memory._record_memory_history(enabled=None)
            print(f"> profile of the iterations up to {iteration} on rank {self._rank}: {path}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"> WARNING: rank {self._rank}: {path} cannot be written: {error}", flush=True)


def nested(outer: Observer, inner: Observer) -> Observer:
    """Return an observer that enters both."""

    @contextlib.contextmanager
    def observe(what: Action | str) -> Iterator[None]:
        with outer(what), inner(what):
            yield

    return observe


PREDICTED = "predicted (the schedule with each stage's mean measured times, and no time for transfers)"


class TraceRecorder:
    """Recorder of the start and end of each computation of a step on this rank; a barrier aligns the ranks' clocks.

    On a GPU the times are those of events in the device's stream: nothing waits for the device before `spans`.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._clock = clock(device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._rank = comm.mesh.coord(PIPELINE)
        self._is_first_of_stage = is_first(comm.mesh)
        comm.barrier()
        self._origin = self._clock.stamp()

    @contextlib.contextmanager
    def observe(self, what: Action | str) -> Iterator[None]:
        """Record start and end of the body if it is a computation."""
        if isinstance(what, str) or what.kind not in COMPUTATIONS:
            yield
            return
        begin = self._clock.stamp()
        yield
        self._marks.append((what, begin, self._clock.stamp()))

    def spans(self) -> list[Span]:
        """Return each computation in milliseconds since the barrier; only on the first rank of each pipeline rank."""
        elapsed_ms, origin = self._clock.elapsed_ms, self._origin
        marks = self._marks if self._is_first_of_stage else []
        return [
            Span(self._rank, action, elapsed_ms(origin, begin), elapsed_ms(origin, end)) for action, begin, end in marks
        ]


def gather_timeline(trace: TraceRecorder, comm: Comm) -> Timeline | None:
    """Return the spans of all pipeline ranks, on rank 0; None elsewhere."""
    ranks = comm.gather_object(trace.spans())
    if ranks is None:
        return None
    rows = (row for rows in ranks for row in rows)
    return Timeline(
        tuple(Span(rank, Action(ActionKind(kind), *place), *times) for rank, (kind, *place), *times in rows)
    )


def write_trace(trace: TraceRecorder, comm: Comm, schedule: Schedule, save: Path, iteration: int) -> None:
    """Write the files of a traced iteration and print its bubble, on rank 0; where that fails, only warn."""
    measured = gather_timeline(trace, comm)
    if measured is None:
        return
    from megatron3d.pipeline import plot  # matplotlib takes half a second to import

    expected = simulate_mean_durations(schedule, measured)
    timelines = {PREDICTED: expected, f"measured in iteration {iteration}": measured}
    path = save / TRACES / f"iter_{iteration:07d}.json"
    try:
        write_text(path, json.dumps(plot.trace(timelines, unit_us=1e3)))
        picture = plot.figure(timelines, time="time in ms")
        write_figure(path.with_suffix(".png"), picture, dpi=150)
        write_figure(path.with_suffix(".svg"), picture)
    except OSError as error:
        print(f"> WARNING: the trace is lost: {path} cannot be written: {error.strerror or error}", flush=True)
        return
    bubbles = f"measured {100 * measured.idle_rate:.1f} %, predicted {100 * expected.idle_rate:.1f} %"
    print(f"> trace of iteration {iteration}: bubble {bubbles}", flush=True)
