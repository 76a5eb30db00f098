"""What the pipeline did in one iteration, and when: `traces/iter_0000010` as .json, .png and .svg in the output folder.

barrier | F B F B ...      every rank notes begin and end of each computation, without what it waited for before
gather  | rank 0 lays the measured times beside those of the schedule, simulated with their means, and draws both
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

FOLDER = "traces"
PREDICTED = "predicted (the schedule with each stage's mean measured times, transfers taking none)"


class Recording:
    """When each computation of a step began and ended on this rank; starts with a barrier, so that clocks agree.

    On a GPU the times are those of the device, noted by events in its stream: nothing waits before `spans`.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._stamp, self._since = clock(device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._rank = comm.mesh.coord("pipeline")
        self._counts = all(comm.mesh.coord(axis) == 0 for axis in comm.mesh.names if axis != "pipeline")
        comm.barrier()
        self._begin = self._stamp()

    @contextlib.contextmanager
    def watch(self, what: Action | str) -> Iterator[None]:
        """Note when the body begins and ends, if it is a computation."""
        if isinstance(what, str) or what.kind not in COMPUTATIONS:
            yield
            return
        begin = self._stamp()
        yield
        self._marks.append((what, begin, self._stamp()))

    def spans(self) -> list[Span]:
        """Milliseconds since the barrier; nothing on ranks that do the same as another one of the pipeline rank."""
        since, origin = self._since, self._begin
        marks = self._marks if self._counts else []
        return [Span(self._rank, action, since(origin, begin), since(origin, end)) for action, begin, end in marks]


def gather(recording: Recording, comm: Comm) -> Timeline | None:
    """What all ranks of the pipeline recorded, on rank 0; None elsewhere."""
    ranks = comm.gather_object(recording.spans())
    return None if ranks is None else Timeline(tuple(span for spans in ranks for span in spans))


def report(recording: Recording, comm: Comm, schedule: Schedule, save: Path, iteration: int) -> None:
    """Write the trace of an iteration, and tell its bubble on rank 0; raises UserError on all ranks where it cannot."""
    measured = gather(recording, comm)
    run_on_all_ranks(comm, lambda: _write(measured, schedule, save, iteration) if measured else None)


def _write(measured: Timeline, schedule: Schedule, save: Path, iteration: int) -> None:
    from megatron3d.pipeline.plot import figure, trace  # matplotlib takes half a second to import

    expected = simulate_mean_durations(schedule, measured)
    timelines = {PREDICTED: expected, f"measured in iteration {iteration}": measured}
    path = trace_folder(save) / f"iter_{iteration:07d}.json"
    try:
        path.write_text(json.dumps(trace(timelines, unit_us=1e3)), encoding="utf-8")
        picture = figure(timelines, time="time in ms")
        picture.savefig(path.with_suffix(".png"), dpi=150)
        picture.savefig(path.with_suffix(".svg"))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"logging.trace_iterations: {path} cannot be written ({reason}); make room, or leave the key out"
        ) from error
    bubbles = f"measured {100 * measured.idle_rate:.1f} %, predicted {100 * expected.idle_rate:.1f} %"
    print(f"> trace of iteration {iteration}: bubble {bubbles}", flush=True)


def trace_folder(save: Path) -> Path:
    """Where the traces of a run are."""
    return save / FOLDER
