"""The training loop, in time order: read, step, report, evaluate, save, stop."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from megatron3d.config.schema import Config
from megatron3d.metrics.timers import BATCH, EVALUATE, SAVE
from megatron3d.optim.optimizer import learning_rate
from megatron3d.runtime.exit_codes import ExitCode
from megatron3d.runtime.process import StopSignal
from megatron3d.train.checkpointing import describe, source_of
from megatron3d.train.evaluate import evaluate
from megatron3d.train.monitor.monitor import Watching
from megatron3d.train.monitor.oom_report import explained, job_of
from megatron3d.train.replica_check import check_replicas
from megatron3d.train.rollback import Judge, roll_back
from megatron3d.train.run import Run
from megatron3d.train.step import train_step

STOP_FILE = "stop"


def train(run: Run, stop: StopSignal) -> int:
    """Train to the end, or until something asks to stop; saves before it returns the exit code."""
    config, state = run.config, run.state
    job = job_of(run.spec, run.runtime.device)
    watching, clock, timers = Watching(run, job), Clock(config), run.timers
    judge, previous = Judge(config.train), None
    stopping = False
    while state.iteration < config.train.train_iters and not stopping:
        if pass_over(run):
            continue
        size = run.batches.at(state.consumed_samples)
        with timers.watch(BATCH):
            batch = run.train_data.step(state.consumed_samples)
        lr = learning_rate(config.optimizer, state.iteration + 1, config.train.train_iters)
        stop_requested = stop.requested is not None or clock.is_over or has_stop_file(run)
        with explained(job):
            result = train_step(state, batch, lr, run.settings(size), stop_requested, watching.begin_step())
        watching.end_step(result, lr, size)
        if _due(state.iteration, config.train.eval_interval):
            with watching.aside(EVALUATE):
                validate(run)
        if _due(state.iteration, config.train.check_weight_hash_across_dp_replicas_interval):
            check_replicas(state)
        stopping = clock.leaves_after(state.iteration) or (previous is not None and bool(previous.stop_requests > 0))
        if previous is not None and judge.is_watching:
            wrong = judge.see(previous.loss.item(), bool(previous.skipped))
            if wrong is not None:
                set_back(run, (wrong[0] + 1, wrong[1]), judge)
                watching.restart()
                previous = None
                continue
        previous = result
        if is_save_due(run):
            with watching.aside(SAVE):
                save(run)
    if run.saver:
        run.saver.finish(state.iteration, source_of(state), describe(state, run.identity, config))
    return ExitCode.STOPPED if state.iteration < config.train.train_iters else ExitCode.DONE


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
    state.consumed_samples += run.batches.at(state.consumed_samples).num_samples
    if run.runtime.rank == 0:
        print(f"> iteration {state.iteration} is skipped, as train.iterations_to_skip says", flush=True)
    return True


def validate(run: Run) -> None:
    """Report the loss on the validation split."""
    if run.valid_data is None:
        return
    size, num_steps = run.config.train.global_batch_size, run.config.train.eval_iters
    steps = (run.valid_data.step(index * size) for index in range(num_steps))
    settings = run.settings(run.batches.last)
    settings = replace(settings, num_tokens=settings.num_tokens * num_steps)
    loss = evaluate(run.state.executor, steps, settings).item()
    if run.metrics:
        run.metrics.evaluation(run.state.iteration, loss)


def is_save_due(run: Run) -> bool:
    """Whether a checkpoint is due after this iteration, permanent or not."""
    checkpoint = run.config.checkpoint
    intervals = checkpoint.save_interval, checkpoint.non_persistent_save_interval
    return any(_due(run.state.iteration, interval) for interval in intervals)


def save(run: Run) -> None:
    """Save, or begin to."""
    state = run.state
    if run.saver:
        is_permanent = _due(state.iteration, run.config.checkpoint.save_interval)
        run.saver.save(state.iteration, source_of(state), describe(state, run.identity, run.config), is_permanent)


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
