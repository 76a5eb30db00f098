"""Writer of all metrics, on rank 0: console, metrics.jsonl, tensorboard and Weights & Biases."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.metrics.journal import Journal
from megatron3d.metrics.step_record import (
    EMA_LOSS,
    StepRecord,
    evaluation_line,
    fp8_loss_line,
    mtp_rows,
    step_line,
    timer_lines,
)
from megatron3d.runtime.files import write_text

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

WANDB_ID = Path("wandb", "run_id.txt")


class Sink(Protocol):
    """Output of metrics, which are numbers by name."""

    def describe(self, start: Mapping[str, Any]) -> None:
        """Record the metadata of a launch."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""

    def go_back(self, iteration: int) -> None:
        """Prepare for logging the steps after `iteration` once more."""

    def close(self) -> None:
        """Finish writing."""


class _EventFile:
    """One file of tensorboard's events, which hides those of older files from the step `purge_step` on.

    Events are written where they are logged: a thread, as tensorboard's own writer has, prints a traceback for a full
    disk.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"  # read in the order of names
        self._file = (folder / name).open("wb", buffering=0)
        start = Event(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        try:
            self.add([Event(step=purge_step, file_version="brain.Event:2"), start])
        except OSError:
            self.close()
            raise

    def add(self, events: Iterable[Event]) -> None:
        """Write events; raises OSError where not all of them can be."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        content = io.BytesIO()
        records = RecordWriter(content)
        for event in events:
            timed = Event(wall_time=time.time())
            timed.MergeFrom(event)
            records.write(timed.SerializeToString())
        if self._file.write(content.getbuffer()) < content.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorboardSink:
    """Tensorboard event files; a launch or rollback hides the steps after the iteration that it continues from.

    Training does not end with the disk's space: rows that cannot be written are lost, and another file is tried after
    `RETRY_S` seconds.
    """

    RETRY_S = 300.0

    def __init__(self, folder: Path, start_iteration: int) -> None:
        self._folder = folder
        self._next_try_s, self._is_told = 0.0, False
        try:
            self._events: _EventFile | None = _EventFile(folder, start_iteration + 1)
        except OSError as error:
            raise UserError(f"logging.tensorboard_dir={folder}: cannot be written: {error.strerror}") from error

    def _write(self, iteration: int, events: Sequence[Event]) -> None:
        """Write what belongs to an iteration, to a new file where the last one was lost, which is said once."""
        if self._events is None and time.monotonic() < self._next_try_s:
            return
        try:
            self._events = self._events or _EventFile(self._folder, iteration)
            self._events.add(events)
        except OSError as error:
            if not self._is_told:
                reason = f"{error.strerror}; its rows are lost, those of metrics.jsonl are not"
                print(f"> WARNING: {self._folder} cannot be written: {reason}", flush=True)
            self.close()
            self._next_try_s, self._is_told = time.monotonic() + self.RETRY_S, True

    def describe(self, start: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import text

        lines = json.dumps(start, indent=1).splitlines()
        summary = text("start", "\n".join(f"    {line}" for line in lines))
        self._write(start["iteration"], [Event(step=start["iteration"], summary=summary)])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import scalar

        self._write(step, [Event(step=step, summary=scalar(name, value)) for name, value in values.items()])

    def go_back(self, iteration: int) -> None:
        """Open another file, which hides the steps after the iteration."""
        self.close()
        self._write(iteration + 1, [])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


class WandbSink:
    """A run of Weights & Biases; offline it writes files under `folder` and needs no network.

    A launch that continues another one in its folder continues its wandb run, whose id the folder keeps.  wandb drops a
    row whose step is not above the one before, so its step counts rows, and curves are over `iteration`: iterations
    that are repeated after a crash or a rollback appear twice, and the later row is the valid one.
    """

    def __init__(self, config: Config, folder: Path, start_iteration: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"logging.wandb_project={config.logging.wandb_project}: the package wandb is not installed; "
                f"pip install wandb, or leave the key out"
            ) from error
        (folder / WANDB_ID).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=config.logging.wandb_name,
                mode="offline" if config.logging.wandb_mode == "offline" else None,  # None: as WANDB_MODE says
                dir=str(folder),
                config=config.model_dump(mode="json"),
                id=run_id(folder / WANDB_ID, start_iteration),
                resume="allow",
                allow_val_change=True,
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logging.wandb_project={config.logging.wandb_project}: wandb did not start ({error}); "
                f"log in with `wandb login`, or set logging.wandb_mode=offline and `wandb sync` later"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self._run.define_metric("validation_loss", step_metric="iteration", summary="min,last")

    def describe(self, start: Mapping[str, Any]) -> None:
        self._run.config.update({"start": dict(start)}, allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "iteration": step})

    def go_back(self, iteration: int) -> None:
        """Log a marker, since no row can be removed."""
        self.log({"rollback_to": iteration}, iteration)

    def close(self) -> None:
        self._run.finish()


def run_id(path: Path, start_iteration: int) -> str:
    """Return the id that an earlier launch stored, or store a new one for a new run."""
    if start_iteration > 0 and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex[:8]
    write_text(path, new + "\n")
    return new


def build_sinks(config: Config, folder: Path | None, start_iteration: int) -> tuple[Sink, ...]:
    """Build the sinks that the configuration enables."""
    sinks: list[Sink] = []
    if config.logging.wandb_project is not None:
        sinks.append(WandbSink(config, folder or Path.cwd(), start_iteration))
    if config.logging.tensorboard_dir is not None:
        sinks.append(TensorboardSink(Path(config.logging.tensorboard_dir), start_iteration))
    return tuple(sinks)


class MetricsWriter:
    """Reports a run that continues after `start_iteration` iterations; without a folder it writes no metrics.jsonl."""

    def __init__(self, folder: Path | None, config: Config, start_iteration: int = 0) -> None:
        self._config, self._train_iters = config, RunSpec(config).train_iters
        self._sinks = build_sinks(config, folder, start_iteration)
        self._journal = None if folder is None else Journal(folder, start_iteration)
        self._start: Mapping[str, Any] | None = None

    def start(self, iteration: int, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of this launch, which are written before its first row."""
        self._start = {"iteration": iteration, "start": metadata}

    def step(self, record: StepRecord, more: Mapping[str, Any] | None = None) -> None:
        """Report one step and further values `more`; the console shows its `timers` at `timing_log_level` 2."""
        more = dict(more or {})
        print(step_line(record, self._train_iters, datetime.now()), flush=True)
        if self._config.logging.timing_log_level == 2:
            print("\n".join(timer_lines(more.get("timers", {}))), flush=True)
        self._write(record.row | more)

    def evaluation(
        self,
        iteration: int,
        validation_loss: float,
        mtp_losses: Sequence[float] = (),
        averaged_loss: float | None = None,
    ) -> None:
        """Report the losses on the validation split after `iteration` steps; one of averaged weights where given."""
        print(evaluation_line(iteration, validation_loss, mtp_losses, averaged_loss), flush=True)
        more = mtp_rows(mtp_losses, "validation_loss")
        more |= {} if averaged_loss is None else {EMA_LOSS: averaged_loss}
        self._write({"iteration": iteration, "validation_loss": validation_loss, **more})

    def rollback(self, iteration: int, message: str) -> None:
        """Report a rollback to an iteration, and drop the rows after it, which will be written again."""
        print(f"> {message}", flush=True)
        if self._journal is not None:
            self._journal.drop_after(iteration)
            self._journal.append({"iteration": iteration, "rollback": message})
        for sink in self._sinks:
            sink.go_back(iteration)

    def replan(self, iteration: int, message: str, details: Mapping[str, Any]) -> None:
        """Report that the run goes on after `iteration` without ranks that were lost, in another layout."""
        print(f"> {message}", flush=True)
        self._write({"iteration": iteration, "replan": message, "replan_details": dict(details)})

    def first_step(self, iteration: int, memory_bytes: Sequence[int]) -> None:
        """Report the peak memory of the first step of this launch, the largest of each pipeline rank."""
        self._write({"iteration": iteration, "first_step": {"memory_bytes": list(memory_bytes)}})

    def straggler(self, iteration: int, rank: int, device: str, ratio: float, gain: str) -> None:
        """Report that a rank has been slow in `logging.straggler_steps` logged steps in a row, and the gain without."""
        count = self._config.logging.straggler_steps
        times = f"{ratio:.2f} times its peers' median own time"
        message = f"rank {rank} ({device}) is slow: {times}, {count} logged steps in a row; {gain}"
        print(f"> straggler: {message}", flush=True)
        self._write({"iteration": iteration, "straggler": message, "straggler_rank": rank})

    def stop(self, iteration: int, why: str) -> None:
        """Report that this launch has ended before the run's last iteration."""
        self._write({"iteration": iteration, "stop": why})

    def statistics(self, iteration: int, key: str, table: Mapping[str, Any]) -> None:
        """Report statistics of layers or linears, which the console does not show."""
        self._write({"iteration": iteration, key: table})

    def noise_scale(self, iteration: int, measured: Mapping[str, float | None]) -> None:
        """Report a measurement of the gradient noise scale."""
        self._write({"iteration": iteration, "noise_scale": measured})

    def fp8_loss(self, iteration: int, loss: float, unquantized: float) -> None:
        """Report the loss of a step with fp8, and that of linears which multiply in precision."""
        print(fp8_loss_line(iteration, loss, unquantized, self._config.train.precision), flush=True)
        row = {"loss": loss, "unquantized_loss": unquantized, "difference": loss - unquantized}
        self._write({"iteration": iteration, "fp8_loss": row})

    def close(self) -> None:
        """Close every output."""
        if self._journal is not None:
            self._journal.close()
        for sink in self._sinks:
            sink.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._start is not None:
            start = self._start
            self._start = None
            if self._journal is not None:
                self._journal.append(start)
            for sink in self._sinks:
                sink.describe({"iteration": start["iteration"], **start["start"]})
        if self._journal is not None:
            self._journal.append(row)
        values = dict(numbers({name: value for name, value in row.items() if name != "iteration"}))
        for sink in self._sinks if values else ():
            sink.log(values, int(row["iteration"]))


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a row with its path, such as `timers/optimizer/max`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
