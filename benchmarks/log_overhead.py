"""Cost of all default logging per step: timers of phases and waits, one gather, a console line and a line of
metrics.jsonl every 10 steps, the search for slow ranks.

It is measured in two ways: in pairs of neighbouring steps with and without logging, in alternating order; and as the
logging of one step without the step, with as many timers as the real step enters.  The cost is the median over pairs,
separately for steps that print their line and for the others; its error is 1.96 standard errors.

python benchmarks/log_overhead.py --output benchmarks/results/log_overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import yaml
from common.corpus import write_random_bytes
from common.report import Row, Turns, interleaved, milliseconds, show, write

from megatron3d.config.resolve import resolve
from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import Action
from megatron3d.runtime import process
from megatron3d.runtime.program import StartupPhases
from megatron3d.train.build import build_run
from megatron3d.train.monitor.monitor import Monitor
from megatron3d.train.monitor.reports import job_of
from megatron3d.train.run import Run
from megatron3d.train.step import StepResult, train_step

TARGET_MS, INTERVAL = 50.0, 10
LR = 1e-4
# Standard deviations in a normal distribution's median absolute deviation, and in a median's error over a mean's.
NORMAL, OF_MEDIAN = 1.4826, 1.2533
CASES = {
    "1 rank": [],
    "2 ranks, data parallel, ZeRO 1": ["parallel.zero_stage=1"],
    "2 ranks, pipeline": ["parallel.pipeline_model_parallel_size=2"],
    "2 ranks, tensor parallel": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
}


def write_inputs(folder: Path) -> Path:
    """Write random bytes as a corpus, and the configuration of a model whose step takes about 50 ms on one core."""
    corpus = write_random_bytes(folder / "corpus")
    config = {
        "model": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10**6},
        "data": {"data_path": str(corpus), "tokenizer_type": "ByteTokenizer", "split": "100,0,0"},
        "logging": {"log_interval": INTERVAL, "peak_tflops": 0.1},
        "checkpoint": {"save": str(folder / "run")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def added_pct(turns: Turns, last_iteration: int, clock: str) -> tuple[float, float]:
    """Return the percentage that logging adds to a step, on average over an interval, and 1.96 standard errors."""
    seconds = {name: [getattr(turn, clock) for turn in turns[name]] for name in ("bare", "logged")}
    pairs = [logged - bare for bare, logged in zip(seconds["bare"], seconds["logged"], strict=True)]
    first = last_iteration + 1 - len(pairs)
    added = variance = 0.0
    for has_line, weight in ((True, 1 / INTERVAL), (False, 1 - 1 / INTERVAL)):
        found = [pair for number, pair in enumerate(pairs, first) if (number % INTERVAL == 0) == has_line]
        middle = statistics.median(found)
        spread = NORMAL * statistics.median(abs(each - middle) for each in found)
        added += weight * middle
        variance += (weight * OF_MEDIAN * spread) ** 2 / len(found)
    percent = 100 / statistics.median(seconds["bare"])
    return percent * added, percent * 1.96 * variance**0.5


class Contest:
    """One run, whose steps are made with and without logging."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._monitor = Monitor(run, job_of(run.spec, run.runtime.device))
        self._entered: list[Action | str] = []
        self._waited: list[Axes] = []
        self._result = self._step(self._note)

    def _step(self, observer: Callable[[Action | str], contextlib.AbstractContextManager[None]]) -> StepResult:
        run = self.run
        with observer("batch-generator"):
            batch = run.train_data.step(run.state.consumed_samples)
        return train_step(run.state, batch, LR, run.step_settings(run.batches.last), observer=observer)

    @contextlib.contextmanager
    def _note(self, what: Action | str) -> Iterator[None]:
        """Record which timers a step enters, and what it waits for."""
        self._entered.append(what)
        self.run.comm.set_wait_hook(self._note_wait)
        yield

    def _note_wait(self, axes: Axes) -> contextlib.AbstractContextManager[None]:
        self._waited.append(axes)
        return contextlib.nullcontext()

    @property
    def num_timed(self) -> int:
        """Number of timers that a step enters."""
        return len(self._entered) + len(self._waited)

    def bare(self) -> None:
        """Make a step without logging, which is not counted."""
        self.run.comm.set_wait_hook(None)
        self._step(lambda what: contextlib.nullcontext()).loss.item()
        self.run.state.iteration -= 1

    def logged(self) -> None:
        """Make a step as the loop does, with logging."""
        self.run.comm.set_wait_hook(self.run.timers.waiting)
        result = self._step(self._monitor.begin_step())
        self._end_step(result)
        result.loss.item()

    def logging_alone(self) -> None:
        """Do all logging of a step without the step."""
        timers = self.run.timers
        for _ in range(INTERVAL):
            observer = self._monitor.begin_step()
            for what in self._entered:
                with observer(what):
                    pass
            for axes in self._waited:
                with timers.waiting(axes):
                    pass
            self.run.state.iteration += 1
            self._end_step(self._result)

    def _end_step(self, result: StepResult) -> None:
        is_logged = self.run.state.iteration % INTERVAL == 0
        self._monitor.end_step(result, LR, self.run.batches.last, is_logged=is_logged)


def measure(name: str, config: Path, rounds: int) -> Row:
    """Return a row for one layout; what is printed meanwhile is discarded."""
    with process.start(on_cpu=True) as here, contextlib.redirect_stdout(io.StringIO()):
        torch.set_num_threads(1)
        save = f"checkpoint.save={config.parent / name.replace(' ', '-')}"
        run = build_run(resolve(config, [*CASES[name], save], here.world_size), here, StartupPhases(False))
        contest = Contest(run)
        steps = {"bare": contest.bare, "logged": contest.logged}
        turns = interleaved(steps, rounds * INTERVAL, INTERVAL, run.comm.barrier)
        wall, cpu = (added_pct(turns, run.state.iteration, clock) for clock in ("wall_s", "cpu_s"))
        alone = interleaved({"alone": contest.logging_alone}, rounds, 2, run.comm.barrier)["alone"]
        run.close()
    alone_ms = {key: ms / INTERVAL for key, ms in milliseconds(alone).items()}
    return {
        "layout": name,
        "timers per step": contest.num_timed,
        "bare_step_ms": milliseconds(turns["bare"])["step_ms"],
        "added_pct": wall[0],
        "error_pct": wall[1],
        "added_cpu_pct": cpu[0],
        "error_cpu_pct": cpu[1],
        "alone_ms": alone_ms["step_ms"],
        "alone_best_ms": alone_ms["best_ms"],
        "alone_cpu_ms": alone_ms["cpu_ms"],
        "alone_cpu_of_50_ms_pct": 100 * alone_ms["cpu_ms"] / TARGET_MS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every layout; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--quick", action="store_true", help="smallest setting, which only shows that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.cases = 1, ["1 rank"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        config = write_inputs(Path(folder))
        for name in args.cases:
            alone = name.startswith("1 ")
            rows.append(
                measure(name, config, args.rounds) if alone else process.launch(2, measure, name, config, args.rounds)
            )
    show("what logging costs", rows)
    if args.output:
        write(args.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
