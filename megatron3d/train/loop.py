"""The training loop in time order: read a batch, step, report, evaluate, detect spikes, save, stop."""

from __future__ import annotations

import gc
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron3d.comm.objects import on_rank_0
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import TrainConfig
from megatron3d.data.loader import BatchLoader
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import FILE_NAME as JOURNAL
from megatron3d.metrics.journal import validation_losses
from megatron3d.metrics.timers import BATCH, EVALUATE, SAVE
from megatron3d.runtime.program import StopSignal
from megatron3d.train.checkpointing import describe, describe_alone, source_of
from megatron3d.train.fp8_loss import Fp8Loss
from megatron3d.train.monitor.monitor import Monitor
from megatron3d.train.monitor.reports import job_of, oom_report
from megatron3d.train.noise_scale import NoiseScale
from megatron3d.train.replan import RankChanges
from megatron3d.train.rollback import Rollbacks
from megatron3d.train.run import Run
from megatron3d.train.state import check_replicas
from megatron3d.train.step import Readout, evaluate, train_step


class ManualGc:
    """While entered, collects garbage only in `after_step`, on all ranks after the same step (Megatron's --manual-gc).

    By itself Python collects when it has made enough objects, at another time on each rank: with a thousand ranks one
    of them is collecting in nearly every step, and all wait for it.  Objects of the start are not looked at again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._is_manual, self._interval = config.manual_gc, config.manual_gc_interval

    def __enter__(self) -> ManualGc:
        if self._is_manual:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, iteration: int) -> None:
        """Collect if `iteration` is a multiple of `train.manual_gc_interval`."""
        if self._is_manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._is_manual:
            gc.unfreeze()
            gc.enable()


STOP_FILE = "stop"


def train(run: Run, stop: StopSignal, goes_on: bool = False) -> int:
    """Train to the last iteration, or until a stop is requested; save, and return the exit code.

    An exception does not cost the checkpoint that a thread is writing, where the other ranks can still write theirs.

    Args:
        goes_on: after a loss of ranks, which may have interrupted what is due after the last step.
    """
    try:
        if goes_on:
            catch_up(run)
        with ManualGc(run.config.train) as collector, StopFile(stop_folder(run)) as stop_file:
            return _train(run, stop, stop_file, collector)
    except Exception:
        if run.saver:
            run.saver.wait_for_progress()
        raise


def _train(run: Run, stop: StopSignal, stop_file: StopFile, collector: ManualGc) -> int:
    config, state, train_iters = run.config.train, run.state, run.spec.train_iters
    job = job_of(run.spec, run.runtime.device)
    monitor = Monitor(run, job)
    limits, rollbacks, changes = ExitLimits(run.spec), Rollbacks(run), RankChanges(run)
    measurements = NoiseScale(run), Fp8Loss(run)
    stopping = False
    previous: Readout | None = None

    while True:
        if stopping or state.iteration == train_iters:
            if not rollbacks.after_last_step():
                break
            monitor.restart()
            continue
        if state.iteration + 1 in config.iterations_to_skip:
            skip_iteration(run)
            continue

        batch = run.batches.at(state.consumed_samples)
        with run.timers.observe(BATCH):
            microbatches = run.train_data.step(state.consumed_samples)
        lr, weight_decay = run.rates(batch)
        stop_requested = stop.is_requested() or limits.is_time_up or stop_file.is_found
        is_logged = limits.is_last(state.iteration + 1) or is_due(state.iteration + 1, run.config.logging.log_interval)
        with oom_report(job):
            settings = run.step_settings(batch)
            for each in measurements:
                each.before_step(microbatches, settings, monitor.between_steps)
            result = train_step(
                state,
                microbatches,
                lr,
                settings,
                weight_decay=weight_decay,
                stop_requested=stop_requested,
                observer=monitor.begin_step(),
                before_update=lambda: hold_update(run),
                watches_routers=is_logged,
            )
        numbers = Readout(result)
        # A step's numbers are read one step later, so that the host never waits for the device.
        stopping = limits.end_after(state.iteration, previous)
        monitor.end_step(result, lr, batch, is_logged=is_logged or stopping)
        for each in measurements:
            each.after_step(result)
        collector.after_step(state.iteration)

        best_loss = evaluate_and_compare(run, monitor)
        if rollbacks.after_step(numbers):
            monitor.restart()
            previous = None
            continue
        previous = numbers
        if not rollbacks.is_failing:
            changes.after_step(monitor.slow, at_checkpoint=save_what_is_due(run, monitor, best_loss))

    rollbacks.finish()
    save_last(run)
    return exit_code(run, lambda: limits.why_stopped(state.iteration, stop, stop_file))


def evaluate_and_compare(run: Run, monitor: Monitor) -> float | None:
    """Evaluate on the validation split, and compare the data-parallel replicas, where that is due.

    Return the validation loss where that asks for a checkpoint, the best one so far.
    """
    state, config = run.state, run.config.train
    loss = None
    if is_due(state.iteration, config.eval_interval):
        with monitor.between_steps(EVALUATE):
            loss = report_validation_loss(run)
    if is_due(state.iteration, config.check_weight_hash_across_dp_replicas_interval):
        check_replicas(state)
    return loss_to_keep(run, loss)


def catch_up(run: Run) -> None:
    """Evaluate and save what a loss of ranks has interrupted, and give peers new copies of the state.

    A checkpoint is saved where the newest one is older than the last that was due.
    """
    state, saver, interval = run.state, run.saver, run.config.checkpoint.save_interval
    loss: float | None = None
    if is_due(state.iteration, run.config.train.eval_interval):
        journal = saver and saver.root / JOURNAL
        loss = on_rank_0(run.comm, lambda: validation_losses(journal).get(state.iteration) if journal else None)
        loss = report_validation_loss(run) if loss is None else loss
    best_loss = loss_to_keep(run, loss)
    is_behind = interval and saver and (saver.saved_at or 0) < state.iteration // interval * interval
    if saver and (is_behind or best_loss is not None):
        saver.save(state.iteration, source_of(state), describe(state, run.identity, run.config), best_loss=best_loss)
    if run.memory:
        take_in_memory(run)


def loss_to_keep(run: Run, loss: float | None) -> float | None:
    """Return the validation loss where `checkpoint.keep_best` asks for a checkpoint, since no earlier one is lower."""
    is_kept = loss is not None and run.saver and run.config.checkpoint.keep_best and run.saver.is_best(loss)
    return loss if is_kept else None


def skip_iteration(run: Run) -> None:
    """Consume the samples of the next iteration without training on them (`train.iterations_to_skip`)."""
    state = run.state
    state.iteration += 1
    state.consumed_samples += run.batches.at(state.consumed_samples).num_samples
    if run.runtime.rank == 0:
        print(f"> iteration {state.iteration} is skipped, as train.iterations_to_skip says", flush=True)


class StopFile:
    """While entered, looks for the file or folder `stop` in the run's folder, in a thread: no step waits for a disk.

    Args:
        folder: None: there is nothing to look for.
    """

    INTERVAL_S = 1.0

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / STOP_FILE
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stop file", daemon=True)
        self._is_unreadable = False
        self.is_found = False

    def __enter__(self) -> StopFile:
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # without waiting: the folder may not answer

    def _look(self) -> None:
        while not self._end.is_set() and not self.is_found:
            self.is_found = self._consume()
            self._end.wait(self.INTERVAL_S)

    def _consume(self) -> bool:
        """Remove the file or folder and return whether it was there; one that cannot be looked for is not there."""
        assert self._path is not None, "without a folder nothing is looked for"
        try:
            is_folder = stat.S_ISDIR(self._path.stat().st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            if not self._is_unreadable:
                instead = "signals stop the run as well"
                print(f"> {self._path} cannot be looked for ({error.strerror}); {instead}", flush=True)
            self._is_unreadable = True
            return False
        print(f"> stopping: found {self._path}", flush=True)
        try:
            self._path.rmdir() if is_folder else self._path.unlink(missing_ok=True)
        except OSError as error:
            print(f"> {self._path} cannot be removed ({error.strerror}); do so before the next launch", flush=True)
        return True


def stop_folder(run: Run) -> Path | None:
    """Return the folder in which this rank looks for the file `stop`: on rank 0 the run's, None elsewhere."""
    return Path(run.config.checkpoint.save) if run.metrics and run.config.checkpoint.save else None


def report_validation_loss(run: Run) -> float | None:
    """Evaluate on `train.eval_iters` batches of the validation split; report and return the mean loss."""
    if run.valid_data is None:
        return None
    batch_size, num_batches = run.config.train.global_batch_size, run.config.train.eval_iters
    settings = run.step_settings(run.batches.last)
    settings = replace(settings, num_tokens=settings.num_tokens * num_batches)

    def losses(data: BatchLoader) -> list[float]:
        batches = (data.step(index * batch_size) for index in range(num_batches))
        found: list[float] = evaluate(run.state.executor, batches, settings).tolist()
        return found

    loss, *mtp_losses = losses(run.valid_data)
    averaged_loss: float | None = None
    if run.config.optimizer.ema_decay is not None and run.config.train.eval_ema_weights:
        run.state.update.begin()  # of which a loss of ranks may leave half
        with run.state.optimizer.averaged_weights():
            averaged_loss = losses(run.valid_data)[0]
        run.state.update.end()
    if run.metrics:
        run.metrics.evaluation(run.state.iteration, loss, mtp_losses, averaged_loss)
    return loss


def is_save_due(run: Run) -> bool:
    """Return whether a checkpoint, persistent or not, is due after this iteration."""
    checkpoint = run.config.checkpoint
    intervals = checkpoint.save_interval, checkpoint.non_persistent_save_interval
    return any(is_due(run.state.iteration, interval) for interval in intervals)


def save_what_is_due(run: Run, monitor: Monitor, best_loss: float | None) -> bool:
    """Save a checkpoint, and one in memory, where that is due, and return whether either was.

    A loss is that of a checkpoint that is kept as the best.  The next update waits until the state is copied.
    """
    interval = run.config.checkpoint.in_memory_interval
    is_saved, is_copied = is_save_due(run) or best_loss is not None, is_due(run.state.iteration, interval)
    if is_saved:
        with monitor.between_steps(SAVE):
            save(run, best_loss)
    if run.memory and is_copied:
        with monitor.between_steps(SAVE):
            take_in_memory(run)
    return is_saved or is_copied


def take_in_memory(run: Run) -> None:
    """Start an in-memory checkpoint."""
    assert run.memory is not None, "checkpoint.in_memory_interval asks for them"
    run.memory.take(describe_alone(run.state, run.identity, run.config), source_of(run.state))


def save(run: Run, best_loss: float | None = None) -> None:
    """Save a checkpoint, the best one with a loss; with `checkpoint.async_save` only start to."""
    state = run.state
    if run.saver:
        is_persistent = best_loss is not None or is_due(state.iteration, run.config.checkpoint.save_interval)
        described = describe(state, run.identity, run.config)
        run.saver.save(state.iteration, source_of(state), described, is_persistent, best_loss)


def hold_update(run: Run) -> None:
    """Let the update wait until the saves that were started have copied the state."""
    for saver in (run.saver, run.memory):
        if saver:
            saver.hold_update()


def save_last(run: Run) -> None:
    """Save the state that training ended with, unless it is saved, and wait until it is complete."""
    state = run.state
    if run.memory:
        run.memory.wait()
    if run.saver:
        run.saver.finish(state.iteration, source_of(state), describe(state, run.identity, run.config))


def exit_code(run: Run, why_stopped: Callable[[], str]) -> int:
    """Return the exit code of a run that has ended; report why where its last iteration is not reached."""
    iteration = run.state.iteration
    if iteration == run.spec.train_iters:
        return ExitCode.DONE
    if run.metrics:
        run.metrics.stop(iteration, why_stopped())
    return ExitCode.STOPPED


def is_due(iteration: int, interval: int | None) -> bool:
    """Return whether `iteration` is a multiple of `interval`; never without an interval."""
    return interval is not None and iteration % interval == 0


class ExitLimits:
    """The limits of one launch: the run's last iteration, `train.exit_interval` and `train.exit_duration_in_mins`."""

    def __init__(self, spec: RunSpec) -> None:
        minutes = spec.config.train.exit_duration_in_mins
        self._train_iters, self._exit_interval = spec.train_iters, spec.config.train.exit_interval
        self._end_s = time.monotonic() + minutes * 60 if minutes else float("inf")

    @property
    def is_time_up(self) -> bool:
        """Whether the time limit has passed on this rank's clock."""
        return time.monotonic() > self._end_s

    def is_last(self, iteration: int) -> bool:
        """Return whether this launch ends with the iteration without being asked to."""
        return iteration == self._train_iters or is_due(iteration, self._exit_interval)

    def why_stopped(self, iteration: int, stop: StopSignal, stop_file: StopFile) -> str:
        """Return what ended this launch after an iteration before the last one, as this rank knows it."""
        reasons = {
            "train.exit_interval": is_due(iteration, self._exit_interval),
            f"signal {stop.requested}": stop.requested is not None,
            f"the file `{STOP_FILE}`": stop_file.is_found,
            "train.exit_duration_in_mins": self.is_time_up,
        }
        return next((why for why, holds in reasons.items() if holds), "another rank's request")

    def end_after(self, iteration: int, previous: Readout | None) -> bool:
        """Return whether to stop after this iteration, as its number or a rank of the step before asks."""
        return is_due(iteration, self._exit_interval) or (previous is not None and previous.read().stop_requests > 0)
