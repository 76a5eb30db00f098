"""Gradient noise scale: the batch size at which the gradient's noise is as large as the gradient.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1, from the norms of gradients G of a global batch of B samples
and of batches of b samples, into which it is divided:

    signal  |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    noise   S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)           B_simple = S / |G|^2

Both are unbiased, but their ratio is not: moving averages of both are divided.  The batches of b samples are
consecutive samples, whatever ranks and microbatches compute them, so that any layout finds the same numbers.  Their
gradients take a forward and a backward of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.metrics.journal import FILE_NAME, read_journal
from megatron3d.metrics.timers import NOISE
from megatron3d.train.run import Run
from megatron3d.train.state import TrainState
from megatron3d.train.step import StepResult, StepSettings, begin_passes

KEY = "noise_scale"
# Of the moving averages, at each measurement.
DECAY = 0.9


def signal_and_noise(square: float, small_square: float, size: int, small_size: int) -> tuple[float, float]:
    """Return |G|^2 and S, given the squared gradient norms of a batch and of smaller ones (their mean)."""
    signal = (size * square - small_size * small_square) / (size - small_size)
    noise = (small_square - square) / (1 / small_size - 1 / size)
    return signal, noise


def small_square_norm(
    state: TrainState, microbatches: Sequence[Microbatch], settings: StepSettings, small_size: int
) -> Tensor:
    """Return the mean squared gradient norm of the batches of `small_size` samples in a global batch, on every rank.

    The gradients of the next step overwrite those that this leaves behind.
    """
    model, buffers = state.model, state.buffers
    count = settings.num_samples // small_size
    part = replace(settings, num_samples=small_size, num_tokens=settings.num_tokens // count)
    length, squares = len(microbatches) // count, []
    for first in range(0, len(microbatches), length):
        passes = begin_passes(state, microbatches[first : first + length], part)
        buffers.begin_step(len(passes))
        model.routers.begin_step(False)
        state.executor.train(passes, buffers.check_stage)
        buffers.reduce_grads()
        squares.append(buffers.square_norm())
    norms = model.comm.all_reduce(torch.stack(squares), model.comm.mesh.names).wait().sqrt()
    return torch.stack([state.loss_scale.unscale(norm).square() for norm in norms]).mean()


class NoiseScale:
    """Measures the noise scale of a run every `logging.noise_scale_interval` iterations with the full batch."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._square: Tensor | None = None
        # Iteration and moving averages of the measurements, which a launch that continues takes from metrics.jsonl.
        self._rows: list[tuple[int, float, float]] = []
        save = run.config.checkpoint.save
        journal = Path(save) / FILE_NAME if save and run.metrics else None
        for row in read_journal(journal) if journal and journal.exists() else ():
            if KEY in row and row["iteration"] <= run.state.iteration:
                self._add(row["iteration"], row[KEY]["signal"], row[KEY]["noise"])

    def before_step(
        self,
        microbatches: Sequence[Microbatch],
        settings: StepSettings,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Compute the gradients of the small batches of the next step, if it is to be measured."""
        state, logging = self._run.state, self._run.config.logging
        interval, small_size = logging.noise_scale_interval, logging.noise_scale_batch_size
        is_full = self._run.batches.at(state.consumed_samples) == self._run.batches.last
        if interval is None or (state.iteration + 1) % interval or not is_full:
            return
        assert small_size is not None, "the rules require a size with an interval"
        with timed(NOISE):
            self._square = small_square_norm(state, microbatches, settings, small_size)

    def after_step(self, result: StepResult) -> None:
        """Report the step that was measured; one whose gradients are not finite says nothing."""
        square, self._square = self._square, None
        metrics, iteration = self._run.metrics, self._run.state.iteration
        if square is None or metrics is None:
            return
        norms = result.grad_norm.double().square().item(), square.item()
        if all(map(math.isfinite, norms)):
            size, small_size = self._run.config.train.global_batch_size, self._run.config.logging.noise_scale_batch_size
            metrics.noise_scale(iteration, self._add(iteration, *signal_and_noise(*norms, size, small_size or size)))

    def _add(self, iteration: int, signal: float, noise: float) -> Mapping[str, float | None]:
        """Add a measurement; return it with the ratio of the moving averages, None where the signal's is not above 0.

        Both averages lack the same factor of their first measurements.
        """
        while self._rows and self._rows[-1][0] >= iteration:  # after a rollback
            self._rows.pop()
        _, mean_signal, mean_noise = self._rows[-1] if self._rows else (0, 0.0, 0.0)
        mean_signal, mean_noise = (DECAY * mean_signal + signal, DECAY * mean_noise + noise)
        self._rows.append((iteration, mean_signal, mean_noise))
        return {"signal": signal, "noise": noise, "samples": mean_noise / mean_signal if mean_signal > 0 else None}
