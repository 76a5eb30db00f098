"""Rollback of a run whose training went wrong: load the last good checkpoint, and skip the data of that window.

Training went wrong after a number of steps in a row without an update, or with a loss far above the recent ones,

    (loss - median) / (1.4826 * median absolute deviation)  >  rollback_loss_spike_score

over the last `rollback_window` losses; for normally distributed losses the left side is in standard deviations.
PaLM's authors restarted from an earlier checkpoint and skipped some hundred batches by hand (Chowdhery et al. 2022,
arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron3d.checkpoint.publish import finished_checkpoints, iteration_folder, move_tracker_back
from megatron3d.comm.objects import on_rank_0
from megatron3d.config.schema import TrainConfig
from megatron3d.errors import RunFailed
from megatron3d.train.checkpointing import LoadOptions, describe, find_best, load_newest, source_of
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState
from megatron3d.train.step import Readout

MIN_LOSSES = 16
"""Losses that are seen before one can be a spike."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""


@dataclass(frozen=True)
class Spike:
    """Steps that went wrong.

    Attributes:
        num_steps: number of these steps, which end with the last one.
        reason: what was wrong, in words.
    """

    num_steps: int
    reason: str


class SpikeDetector:
    """Finds non-finite steps and loss spikes; every rank reads the same losses and so finds the same."""

    def __init__(self, config: TrainConfig) -> None:
        self._max_nonfinite = config.rollback_nonfinite_steps
        self._max_score = config.rollback_loss_spike_score
        self._losses: deque[float] = deque(maxlen=config.rollback_window)
        self._num_nonfinite = 0

    @property
    def is_enabled(self) -> bool:
        """Whether the configuration asks for rollbacks; only then does the host read each step's loss."""
        return bool(self._max_nonfinite or self._max_score)

    def check(self, loss: float, skipped: bool) -> Spike | None:
        """Return what went wrong up to this step, given its loss and whether its update was skipped, or None."""
        if skipped or not math.isfinite(loss):
            self._num_nonfinite += 1
            if self._num_nonfinite != self._max_nonfinite:
                return None
            self._num_nonfinite = 0
            return Spike(self._max_nonfinite, f"{self._max_nonfinite} steps in a row had a non-finite loss or gradient")
        self._num_nonfinite = 0
        score = self._score(loss)
        if self._max_score is not None and score > self._max_score:
            return Spike(1, f"loss {loss:.6g} is {score:.1f} deviations above the last {len(self._losses)} losses")
        self._losses.append(loss)
        return None

    def _score(self, loss: float) -> float:
        if len(self._losses) < MIN_LOSSES:
            return 0.0
        median = statistics.median(self._losses)
        deviation = DEVIATIONS_PER_MAD * statistics.median(abs(each - median) for each in self._losses)
        return (loss - median) / deviation if deviation else 0.0


class Rollbacks:
    """Rolls a run back after each spike; a step's loss is read one step later, when the next one has run as well."""

    def __init__(self, run: Run) -> None:
        self._run, self._detector = run, SpikeDetector(run.config.train)
        self._num_rollbacks = 0
        self._unread: Readout | None = None
        # Of the steps that were read: with `train.iterations_to_skip` these are not consecutive.
        self._iterations = deque[int](maxlen=max(1, run.config.train.rollback_nonfinite_steps or 1))
        self._iteration = 0
        self._num_read = self._num_skipped = self._num_nonfinite = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last step that was read was not finite."""
        return self._num_nonfinite > 0

    def after_step(self, numbers: Readout) -> bool:
        """Roll back if the step before this one ended in a spike, and return whether it did.

        Raises RunFailed as `roll_back`.
        """
        if self.after_last_step():
            return True
        self._unread, self._iteration = numbers, self._run.state.iteration
        return False

    def after_last_step(self) -> bool:
        """Roll back if the step that was not read yet ended in a spike, and return whether it did; raises likewise."""
        unread, self._unread = self._unread, None
        if unread is None:
            return False
        numbers = unread.read()
        loss, skipped = numbers.loss, numbers.skipped
        self._iterations.append(self._iteration)
        self._num_read += 1
        self._num_skipped += skipped
        self._num_nonfinite = self._num_nonfinite + 1 if skipped or not math.isfinite(loss) else 0
        spike = self._detector.check(loss, skipped) if self._detector.is_enabled else None
        if spike is None:
            if self._num_nonfinite == self._run.config.train.max_nonfinite_steps:
                self._fail()
            return False
        self._num_nonfinite = 0
        self._num_rollbacks += 1
        roll_back(self._run, spike, self._num_rollbacks, last_good=self._iterations[-spike.num_steps] - 1)
        self._iterations.clear()
        return True

    def finish(self) -> None:
        """Say how many steps were skipped, before the last checkpoint is saved.

        Raises RunFailed where a run has come to its end without a finite step, or stops after steps that updated
        nothing and its weights are not finite: they are worth no checkpoint.
        """
        run = self._run
        if run.runtime.rank == 0 and self._num_skipped:
            print(f"> {self._num_skipped} of {self._num_read} steps had non-finite gradients, and updated nothing")
        is_done = run.state.iteration == run.spec.train_iters
        has_no_finite_step = 0 < self._num_read == self._num_nonfinite
        if is_done and has_no_finite_step and run.config.train.max_nonfinite_steps:
            self._fail()
        if self.is_failing and not has_finite_weights(run.state):
            self._fail()

    def _fail(self) -> None:
        """Raise RunFailed, which names the last checkpoint from before the steps without a finite loss or gradient."""
        run, first = self._run, self._iteration - self._num_nonfinite + 1
        root = Path(run.config.checkpoint.save) if run.config.checkpoint.save else None
        if run.saver:
            run.saver.wait()
        good = [saved for saved in (finished_checkpoints(root) if root else ()) if saved < first]
        last = f"{iteration_folder(root, max(good))} is the last good checkpoint" if root and good else "none was saved"
        raise RunFailed(
            f"iteration {self._iteration}: the last {self._num_nonfinite} steps had a non-finite loss or gradient; "
            f"{last} before; use a lower optimizer.lr or loss scale, or train.max_nonfinite_steps=null to go on"
        )


def has_finite_weights(state: TrainState) -> bool:
    """Return whether all weights are finite, on all ranks of the run."""
    state.buffers.settle()
    comm = state.model.comm
    sums = torch.stack([flat.main.sum(dtype=torch.float64) for flat in state.buffers.flat_buffers])
    num_bad = (~torch.isfinite(sums)).sum().to(torch.float32)
    return not comm.all_reduce(num_bad.reshape(1), comm.mesh.names).wait().item()


def roll_back(run: Run, spike: Spike, num_rollbacks: int, last_good: int) -> None:
    """Load the newest good checkpoint from before the spike, skip the samples since then, and report it.

    The checkpoint is saved again with the new place in the data: a launch that continues it reads no skipped sample.

    Args:
        num_rollbacks: rollbacks of this launch, this one included.
        last_good: the iteration before the spike.

    Raises:
        RunFailed: on all ranks, after `train.max_rollbacks` rollbacks, or if no such checkpoint exists.
    """
    state, max_rollbacks = run.state, run.config.train.max_rollbacks
    iteration, next_sample = state.iteration, state.consumed_samples
    if num_rollbacks > max_rollbacks:
        raise RunFailed(f"iteration {iteration}: {spike.reason}, after train.max_rollbacks={max_rollbacks} rollbacks")
    assert run.saver is not None, "a run that rolls back saves checkpoints"
    run.saver.wait()
    if run.memory:
        run.memory.forget()
    load_good_checkpoint(run, spike, last_good)
    first_skipped, state.consumed_samples = state.consumed_samples, next_sample
    if run.metrics:
        run.metrics.rollback(
            state.iteration,
            f"{spike.reason}: rolled back from iteration {iteration} to {state.iteration}, "
            f"skipping samples {first_skipped} to {next_sample - 1}",
        )
    if run.config.checkpoint.keep_best:
        run.saver.start_from(find_best(run.saver.root, state.iteration, run.comm))
    run.saver.saved_at = None
    run.saver.save(state.iteration, source_of(state), describe(state, run.identity, run.config))


def load_good_checkpoint(run: Run, spike: Spike, last_good: int) -> None:
    """Load the newest checkpoint up to the iteration `last_good`; later ones are no longer the run's newest.

    Raises RunFailed on all ranks if there is none.
    """
    assert run.config.checkpoint.save is not None, "a run that rolls back has a folder"
    iteration, root = run.state.iteration, Path(run.config.checkpoint.save)

    def choose() -> bool:
        earlier = [saved for saved in finished_checkpoints(root) if saved <= last_good]
        if earlier:
            move_tracker_back(root, max(earlier))
        return bool(earlier)

    options = LoadOptions(accept=frozenset(run.config.checkpoint.accept_changed))
    exists = on_rank_0(run.comm, choose)
    if not (exists and load_newest(root, run.state, run.identity, options)[0]):
        raise RunFailed(
            f"iteration {iteration}: {spike.reason}, and {root} holds no good checkpoint from before to roll back to"
        )
