"""The training loop, in time order: read, step, report, evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import JsonValue

from megatron3d.checkpoint.lock import FolderLock
from megatron3d.checkpoint.saver import Saver
from megatron3d.config.schema import Config
from megatron3d.cost.forecast import STEPS, forecast
from megatron3d.data.loader import Loader, Prefetching
from megatron3d.data.packing import Packing
from megatron3d.memory.job import Job
from megatron3d.metrics import MetricsWriter, StepRecord, peak_memory_bytes
from megatron3d.model.count import flops_per_token
from megatron3d.optim import learning_rate
from megatron3d.pipeline.engine import unwatched
from megatron3d.runtime import EXIT_DONE, EXIT_STOPPED, Runtime, StopSignal
from megatron3d.train.evaluate import evaluate
from megatron3d.train.memory import explained, job_of, measured_table
from megatron3d.train.replicas import check_replicas
from megatron3d.train.resume import describe, source_of
from megatron3d.train.setback import Judge, roll_back
from megatron3d.train.state import TrainState
from megatron3d.train.step import Settings, StepResult, train_step
from megatron3d.train.trace import Recording, report

STOP_FILE = "stop"


@dataclass(frozen=True)
class Run:
    """Everything that a run consists of.

    Attributes:
        metrics: on rank 0, None elsewhere.
        saver: writes checkpoints; None where the run has no folder.
        lock: of that folder, on rank 0.
        identity: what a later run must share to continue this one.
        peak_flops: of one device, None where unknown.
        baseline_bytes: peak memory before the model was built.
        packing: what documents in samples mean.
        consumed_tokens: of each corpus of a blend in the first samples, to be logged.
    """

    config: Config
    runtime: Runtime
    state: TrainState
    train_data: Prefetching
    valid_data: Loader | None
    metrics: MetricsWriter | None
    saver: Saver | None
    lock: FolderLock | None
    identity: Mapping[str, JsonValue]
    peak_flops: float | None
    baseline_bytes: int
    packing: Packing
    consumed_tokens: Callable[[int], Mapping[str, float]]

    @property
    def settings(self) -> Settings:
        """Constants of a step."""
        train = self.config.train
        num_tokens = train.global_batch_size * self.config.model.seq_length
        return Settings(train.seed, num_tokens, train.global_batch_size, self.packing)

    def close(self) -> None:
        """Let go of the folder."""
        if self.metrics:
            self.metrics.close()
        if self.lock:
            self.lock.release()


def train(run: Run, stop: StopSignal) -> int:
    """Train to the end, or until something asks to stop; saves before it returns the exit code."""
    config, state, settings = run.config, run.state, run.settings
    meter, clock = Meter(run), Clock(config)
    judge, previous = Judge(config.train), None
    stopping = False
    job, first = job_of(config, state.model, run.runtime.device), state.iteration + 1
    while state.iteration < config.train.train_iters and not stopping:
        if pass_over(run):
            continue
        batch = run.train_data.step(state.consumed_samples)
        lr = learning_rate(config.optimizer, state.iteration + 1, config.train.train_iters)
        stop_requested, recording = stop.requested is not None or clock.is_over or has_stop_file(run), record(run)
        with explained(job):
            result = train_step(state, batch, lr, settings, stop_requested, recording.watch if recording else unwatched)
        meter.add(result, lr)
        if state.iteration == first:
            show_memory(run, job)
            meter.restart()
        if recording:
            draw(run, recording)
            meter.restart()
        if _due(state.iteration, config.train.eval_interval):
            validate(run)
            meter.restart()
        if _due(state.iteration, config.train.check_weight_hash_across_dp_replicas_interval):
            check_replicas(state)
        stopping = clock.leaves_after(state.iteration) or (previous is not None and bool(previous.stop_requests > 0))
        if previous is not None and judge.is_watching:
            wrong = judge.see(previous.loss.item(), bool(previous.skipped))
            if wrong is not None:
                set_back(run, (wrong[0] + 1, wrong[1]), judge)
                meter.restart()
                previous = None
                continue
        previous = result
        if save(run):
            meter.restart()
    if run.saver:
        run.saver.finish(state.iteration, source_of(state), describe(state, run.identity, config))
    return EXIT_STOPPED if state.iteration < config.train.train_iters else EXIT_DONE


def has_stop_file(run: Run) -> bool:
    """Whether somebody has put a file `stop` into the run's folder, which is removed: it asks once."""
    if run.metrics is None or run.config.checkpoint.save is None:
        return False
    path = Path(run.config.checkpoint.save, STOP_FILE)
    if not path.exists():
        return False
    print(f"> stopping: {path} is there", flush=True)
    path.unlink(missing_ok=True)
    return True


def set_back(run: Run, wrong: tuple[int, str], judge: Judge) -> None:
    """Go back to a good checkpoint; raises RuntimeError where that has been done too often."""
    most, root = run.config.train.max_rollbacks, run.config.checkpoint.save
    judge.num_rollbacks += 1
    if judge.num_rollbacks > most:
        raise RuntimeError(f"iteration {run.state.iteration}: {wrong[1]}, after train.max_rollbacks={most} rollbacks")
    if run.saver:
        run.saver.wait()
    said = roll_back(Path(root) if root else None, run.state, run.identity, wrong)
    if run.saver:
        run.saver.saved_at = run.state.iteration
    if run.metrics:
        run.metrics.rollback(run.state.iteration, said)


def pass_over(run: Run) -> bool:
    """Whether the next iteration is one of `train.iterations_to_skip`: its samples are used up, and nothing is done."""
    state = run.state
    if state.iteration + 1 not in run.config.train.iterations_to_skip:
        return False
    state.iteration += 1
    state.consumed_samples += run.settings.num_samples
    if run.runtime.rank == 0:
        print(f"> iteration {state.iteration} is skipped, as train.iterations_to_skip says", flush=True)
    return True


def show_memory(run: Run, job: Job) -> None:
    """Say what the first step has needed beside what was predicted."""
    needed = peak_memory_bytes(run.runtime.device) - run.baseline_bytes
    table = measured_table(job, run.state.model.comm, needed)
    if table:
        how = "tensors at most" if run.runtime.device.type != "cpu" else "what the whole process has grown by"
        print("\n".join(f"> {line}" for line in (f"memory by arithmetic, and in the first step ({how}):", *table)))


def record(run: Run) -> Recording | None:
    """What notes the times of the next step, if it is one of `logging.trace_iterations`."""
    is_due = run.state.iteration + 1 in run.config.logging.trace_iterations
    return Recording(run.state.model.comm, run.runtime.device) if is_due else None


def draw(run: Run, recording: Recording) -> None:
    """Write what was noted beside what the schedule predicts."""
    assert run.config.checkpoint.save is not None, "a traced run has a folder"
    state = run.state
    report(recording, state.model.comm, state.flow.pipeline.schedule, Path(run.config.checkpoint.save), state.iteration)


def validate(run: Run) -> None:
    """Report the loss on the validation split."""
    if run.valid_data is None:
        return
    size, num_steps = run.config.train.global_batch_size, run.config.train.eval_iters
    steps = (run.valid_data.step(index * size) for index in range(num_steps))
    settings = replace(run.settings, num_tokens=run.settings.num_tokens * num_steps)
    loss = evaluate(run.state.flow, steps, settings).item()
    if run.metrics:
        run.metrics.evaluation(run.state.iteration, loss)


def save(run: Run) -> bool:
    """Save, or begin to, if that is due; returns whether it was."""
    state, checkpoint = run.state, run.config.checkpoint
    is_permanent = _due(state.iteration, checkpoint.save_interval)
    is_due = is_permanent or _due(state.iteration, checkpoint.non_persistent_save_interval)
    if run.saver and is_due:
        run.saver.save(state.iteration, source_of(state), describe(state, run.identity, run.config), is_permanent)
    return is_due


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


class Clock:
    """The limits of a run: `train.exit_interval` and `train.exit_duration_in_mins`."""

    def __init__(self, config: Config) -> None:
        minutes = config.train.exit_duration_in_mins
        self._exit_interval = config.train.exit_interval
        self._end_s = time.monotonic() + minutes * 60 if minutes else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether the time is up, as this rank's clock says."""
        return time.monotonic() > self._end_s

    def leaves_after(self, iteration: int) -> bool:
        """Whether to leave after this iteration, the same on every rank."""
        return _due(iteration, self._exit_interval)


class Meter:
    """Time, skipped steps and throughput between two lines of the log; values are read only when a line is due."""

    def __init__(self, run: Run) -> None:
        self._run, self._skipped = run, torch.zeros((), device=run.runtime.device)
        arch, runtime = run.state.model.arch, run.runtime
        self._flops = flops_per_token(arch)
        self._forecast = forecast(run.config, arch, runtime.world_size, runtime.device.type == "cpu")
        self._seen_steps, self._seen_s = 0, 0.0
        self.restart()

    def restart(self) -> None:
        """Begin to measure anew, after something that is not training."""
        self._begin_s, self._num_steps = time.perf_counter(), 0

    def add(self, result: StepResult, lr: float) -> None:
        """Count a step, and report it if it is due."""
        run = self._run
        self._num_steps += 1
        self._skipped += result.skipped
        if not _due(run.state.iteration, run.config.logging.log_interval):
            return
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        elapsed_s = (time.perf_counter() - self._begin_s) / self._num_steps
        if run.metrics:
            record = self._record(loss, grad_norm, lr, elapsed_s)
            run.metrics.step(record, run.consumed_tokens(record.consumed_samples))
            self._judge_forecast(elapsed_s)
        self._skipped.zero_()
        self.restart()

    def _judge_forecast(self, elapsed_s: float) -> None:
        """Say once what was predicted, when enough steps after the first were measured."""
        if self._seen_steps >= STEPS or isinstance(self._forecast, str):
            return
        self._seen_s += elapsed_s * self._num_steps
        self._seen_steps += self._num_steps
        if self._seen_steps >= STEPS:
            lines = self._forecast.verdict(self._seen_s / self._seen_steps)
            print("\n".join(f"> {line}" for line in lines), flush=True)

    def _record(self, loss: float, grad_norm: float, lr: float, elapsed_s: float) -> StepRecord:
        run, state = self._run, self._run.state
        tokens_per_s = run.settings.num_tokens / elapsed_s
        per_rank = tokens_per_s / run.runtime.world_size
        return StepRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_samples * run.config.model.seq_length,
            lm_loss=loss,
            grad_norm=grad_norm,
            learning_rate=lr,
            elapsed_ms=1000 * elapsed_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=per_rank,
            mfu=per_rank * self._flops / run.peak_flops if run.peak_flops else None,
            peak_memory_bytes=peak_memory_bytes(run.runtime.device),
            skipped_iterations=int(self._skipped),
            loss_scale=state.loss_scale.value,
        )
