"""Writer of all metrics, on rank 0: console, metrics.jsonl, tensorboard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron3d.config.schema import Config
from megatron3d.metrics.journal import Journal
from megatron3d.metrics.sinks import build_sinks
from megatron3d.metrics.step_record import StepRecord, evaluation_line, mtp_rows, step_line, timer_lines


class MetricsWriter:
    """Reports a run that continues after `start_iteration` iterations; without a folder it writes no metrics.jsonl."""

    def __init__(self, folder: Path | None, config: Config, start_iteration: int = 0) -> None:
        self._config = config
        self._sinks = build_sinks(config, folder, start_iteration)
        self._journal = None if folder is None else Journal(folder, start_iteration)
        self._start: Mapping[str, Any] | None = None

    def start(self, iteration: int, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of this launch, which are written before its first row."""
        self._start = {"iteration": iteration, "start": metadata}

    def step(self, record: StepRecord, more: Mapping[str, Any] | None = None) -> None:
        """Report one step and further values `more`; the console shows its `timers` at `timing_log_level` 2."""
        more = dict(more or {})
        print(step_line(record, self._config.train.train_iters, datetime.now()), flush=True)
        if self._config.logging.timing_log_level == 2:
            print("\n".join(timer_lines(more.get("timers", {}))), flush=True)
        self._write(record.row | more)

    def evaluation(self, iteration: int, validation_loss: float, mtp_losses: Sequence[float] = ()) -> None:
        """Report the losses on the validation split after `iteration` steps."""
        print(evaluation_line(iteration, validation_loss, mtp_losses), flush=True)
        ahead = mtp_rows(mtp_losses, "validation_loss")
        self._write({"iteration": iteration, "validation_loss": validation_loss, **ahead})

    def rollback(self, iteration: int, message: str) -> None:
        """Report a rollback to an iteration, and drop the rows after it, which will be written again."""
        print(f"> {message}", flush=True)
        if self._journal is not None:
            self._journal.drop_after(iteration)
            self._journal.append({"iteration": iteration, "rollback": message})
        for sink in self._sinks:
            sink.go_back(iteration)

    def first_step(self, iteration: int, memory_bytes: Sequence[int]) -> None:
        """Report the peak memory of the first step of this launch, the largest of each pipeline rank."""
        self._write({"iteration": iteration, "first_step": {"memory_bytes": list(memory_bytes)}})

    def straggler(self, iteration: int, rank: int, device: str, ratio: float) -> None:
        """Report that a rank has been slow in `logging.straggler_steps` logged steps in a row."""
        count = self._config.logging.straggler_steps
        times = f"{ratio:.2f} times its peers' median own time"
        message = f"rank {rank} ({device}) is slow: {times}, {count} logged steps in a row"
        print(f"> straggler: {message}", flush=True)
        self._write({"iteration": iteration, "straggler": message, "straggler_rank": rank})

    def tensor_statistics(self, iteration: int, statistics: Mapping[str, Any]) -> None:
        """Report the tensor statistics of each layer, which the console does not show."""
        self._write({"iteration": iteration, "moments": statistics})

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
        for sink in self._sinks:
            sink.log(values, int(row["iteration"]))


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a row with its path, such as `timers/optimizer/max`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
