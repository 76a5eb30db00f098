"""Trace of one iteration of the pipeline: `traces/iter_0000010` as .json, .png and .svg in the run's folder.

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

from megatron3d.comm.interface import Comm
from megatron3d.comm.run_on_all_ranks import run_on_all_ranks
from megatron3d.errors import UserError
from megatron3d.metrics.timers import clock
from megatron3d.pipeline.actions import COMPUTATIONS, Action, Schedule
from megatron3d.pipeline.simulate import Span, Timeline, simulate_mean_durations
from megatron3d.runtime.files import write_figure, write_text

FOLDER = "traces"
PREDICTED = "predicted (the schedule with each stage's mean measured times, and no time for transfers)"


class TraceRecorder:
    """Recorder of the start and end of each computation of a step on this rank; a barrier aligns the ranks' clocks.

    On a GPU the times are those of events in the device's stream: nothing waits for the device before `spans`.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._clock = clock(device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._rank = comm.mesh.coord("pipeline")
        self._is_first_of_stage = all(comm.mesh.coord(axis) == 0 for axis in comm.mesh.names if axis != "pipeline")
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
    return None if ranks is None else Timeline(tuple(span for spans in ranks for span in spans))


def write_trace(trace: TraceRecorder, comm: Comm, schedule: Schedule, save: Path, iteration: int) -> None:
    """Write the files of a traced iteration and print its bubble, on rank 0.

    Raises UserError on all ranks if a file cannot be written.
    """
    measured = gather_timeline(trace, comm)
    run_on_all_ranks(comm, lambda: _write(measured, schedule, save, iteration) if measured else None)


def _write(measured: Timeline, schedule: Schedule, save: Path, iteration: int) -> None:
    from megatron3d.pipeline.plot import figure, trace  # matplotlib takes half a second to import

    expected = simulate_mean_durations(schedule, measured)
    timelines = {PREDICTED: expected, f"measured in iteration {iteration}": measured}
    path = trace_folder(save) / f"iter_{iteration:07d}.json"
    try:
        write_text(path, json.dumps(trace(timelines, unit_us=1e3)))
        picture = figure(timelines, time="time in ms")
        write_figure(path.with_suffix(".png"), picture, dpi=150)
        write_figure(path.with_suffix(".svg"), picture)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"logging.trace_iterations: {path} cannot be written ({reason}); free some space, or leave the key out"
        ) from error
    bubbles = f"measured {100 * measured.idle_rate:.1f} %, predicted {100 * expected.idle_rate:.1f} %"
    print(f"> trace of iteration {iteration}: bubble {bubbles}", flush=True)


def trace_folder(save: Path) -> Path:
    """Return the folder of a run's traces."""
    return save / FOLDER
