"""Difference that fp8 makes to the loss: that of a step minus that of linears which multiply in precision.

    loss of the step                             its forward, by linears that multiply fp8
    loss of the same weights, samples, masks     forward once more, by linears that multiply X and W as they are

Both are means over the global batch, so that every layout finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.metrics.timers import FP8_LOSS
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult, StepSettings, begin_passes, loss_copies


def unquantized_loss(state: TrainState, microbatches: Sequence[Microbatch], settings: StepSettings) -> Tensor:
    """Return the loss that the next step would have without fp8, the same on every rank."""
    model = state.model
    with model.unquantized():
        local = state.executor.evaluate(begin_passes(state, microbatches, settings)) / loss_copies(model)
    loss: Tensor = model.comm.all_reduce(local, model.comm.mesh.names).wait()[0]
    return loss


class Fp8Loss:
    """Compares the losses of a run every `logging.fp8_loss_interval` iterations."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._interval = None if run.spec.fp8 is None else run.config.logging.fp8_loss_interval
        self._unquantized: Tensor | None = None

    def before_step(
        self,
        microbatches: Sequence[Microbatch],
        settings: StepSettings,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Compute the loss of the next step without fp8, if it is to be compared."""
        state = self._run.state
        if self._interval is not None and (state.iteration + 1) % self._interval == 0:
            with timed(FP8_LOSS):
                self._unquantized = unquantized_loss(state, microbatches, settings)

    def after_step(self, result: StepResult) -> None:
        """Report the step that was compared."""
        unquantized, self._unquantized = self._unquantized, None
        if unquantized is not None and self._run.metrics:
            self._run.metrics.fp8_loss(self._run.state.iteration, result.loss.item(), unquantized.item())
