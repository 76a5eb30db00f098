"""The one place where rank 0 reports a step: console, metrics.jsonl and whatever sinks are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from megatron3d.config.schema import Config
from megatron3d.metrics.journal import Journal
from megatron3d.metrics.record import StepRecord, evaluation_line, step_line
from megatron3d.metrics.sinks import build_sinks


class MetricsWriter:
    """Reports a run that has done `start_iteration` iterations; without a folder there is no metrics.jsonl."""

    def __init__(self, folder: Path | None, config: Config, start_iteration: int = 0) -> None:
        self._config = config
        self._sinks = build_sinks(config, folder, start_iteration)
        self._journal = None if folder is None else Journal(folder, start_iteration)

    def step(self, record: StepRecord, more: Mapping[str, float] | None = None) -> None:
        """Report one step, and `more` of it that the console does not show."""
        train = self._config.train
        print(step_line(record, train.train_iters, train.global_batch_size, datetime.now()), flush=True)
        self._write(asdict(record) | dict(more or {}))

    def evaluation(self, iteration: int, validation_loss: float) -> None:
        """Report the loss on the validation split after `iteration` steps."""
        print(evaluation_line(iteration, validation_loss), flush=True)
        self._write({"iteration": iteration, "validation_loss": validation_loss})

    def rollback(self, iteration: int, what: str) -> None:
        """Report that the run has gone back to an iteration: what was written after it will be written again."""
        print(f"> {what}", flush=True)
        if self._journal is not None:
            self._journal.drop_after(iteration)
            self._journal.append({"iteration": iteration, "rollback": what})

    def close(self) -> None:
        """Finish writing everywhere."""
        if self._journal is not None:
            self._journal.close()
        for sink in self._sinks:
            sink.close()

    def _write(self, row: dict[str, float | None]) -> None:
        if self._journal is not None:
            self._journal.append(row)
        values = {name: value for name, value in row.items() if name != "iteration" and value is not None}
        for sink in self._sinks:
            sink.log(values, int(row["iteration"] or 0))
