"""The one place where rank 0 reports a step: console, metrics.jsonl and whatever sinks are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron3d.config.schema import Config
from megatron3d.metrics.journal import Journal
from megatron3d.metrics.sinks import build_sinks
from megatron3d.metrics.step_record import StepRecord, evaluation_line, step_line, timer_lines


class MetricsWriter:
    """Reports a run that has done `start_iteration` iterations; without a folder there is no metrics.jsonl."""

    def __init__(self, folder: Path | None, config: Config, start_iteration: int = 0) -> None:
        self._config = config
        self._sinks = build_sinks(config, folder, start_iteration)
        self._journal = None if folder is None else Journal(folder, start_iteration)
        self._start: Mapping[str, Any] | None = None

    def start(self, iteration: int, facts: Mapping[str, Any]) -> None:
        """Report what begins after an iteration; a start that reports nothing else leaves nothing behind."""
        self._start = {"iteration": iteration, "start": facts}

    def step(self, record: StepRecord, more: Mapping[str, Any] | None = None) -> None:
        """Report one step, and `more` of it, of which the console shows `timers` where that is asked for."""
        more = dict(more or {})
        print(step_line(record, self._config.train.train_iters, datetime.now()), flush=True)
        if self._config.logging.timing_log_level == 2:
            print("\n".join(timer_lines(more.get("timers", {}))), flush=True)
        self._write(asdict(record) | more)

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
        for sink in self._sinks:
            sink.go_back(iteration)

    def first_step(self, iteration: int, memory_bytes: Sequence[int]) -> None:
        """Report what the first step of a start has needed, the most of each part of the pipeline."""
        self._write({"iteration": iteration, "first_step": {"memory_bytes": list(memory_bytes)}})

    def straggler(self, iteration: int, rank: int, name: str, ratio: float) -> None:
        """Report that a rank has been slow for as long as `logging.straggler_steps` says."""
        count = self._config.logging.straggler_steps
        what = (
            f"rank {rank} ({name}) is slow: {ratio:.2f} times its peers' median own time, {count} logged steps in a row"
        )
        print(f"> straggler: {what}", flush=True)
        self._write({"iteration": iteration, "straggler": what, "straggler_rank": rank})

    def moments(self, iteration: int, moments: Mapping[str, Any]) -> None:
        """Report what each layer's numbers are like, which the console does not show."""
        self._write({"iteration": iteration, "moments": moments})

    def close(self) -> None:
        """Finish writing everywhere."""
        if self._journal is not None:
            self._journal.close()
        for sink in self._sinks:
            sink.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._start is not None:
            start, self._start = self._start, None
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
    """Every number of a row by its path, `timers/optimizer/max`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
