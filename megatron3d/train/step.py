"""One training step: pure tensor code without a clock, a print or a host branch on a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.data.packing import PLAIN, Packing
from megatron3d.metrics.timers import BATCH, GRADS, SCHEDULE, UPDATE
from megatron3d.model.gpt import GPT
from megatron3d.parallel.layout import num_copies
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.engine import Observer, no_observer
from megatron3d.train.state import TrainState


@dataclass(frozen=True)
class StepSettings:
    """Constants of a step; `num_tokens` of a global batch include those that `packing` masks in the loss."""

    seed: int
    num_tokens: int
    num_samples: int
    packing: Packing = PLAIN


@dataclass(frozen=True)
class StepResult:
    """Result of a step over all ranks, the same on every rank.

    Attributes:
        loss: mean over the tokens of the global batch, in nats.
        grad_norm: global norm of the gradients before clipping.
        skipped: 1.0 if a gradient was not finite and nothing was updated, else 0.0.
        stop_requests: number of ranks that were asked to stop before this step.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    stop_requests: Tensor


def train_step(
    state: TrainState,
    microbatches: Sequence[Microbatch],
    lr: float,
    settings: StepSettings,
    stop_requested: bool = False,
    observer: Observer = no_observer,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Run forward and backward over the microbatches, reduce the gradients, clip and update; advance the state.

    Args:
        before_update: called before the first change of weights and moments is enqueued.
    """
    model, buffers = state.model, state.buffers
    packing, scale = settings.packing, state.loss_scale
    key = (settings.seed, state.iteration)
    with observer(BATCH):
        num_tokens = valid_tokens(model, microbatches, settings)
    passes = [
        model.begin(
            batch.tokens, num_tokens, batch.first_sample, key, scale.factor, packing, batch.starts, settings.num_tokens
        )
        for batch in microbatches
    ]
    buffers.begin_step(len(passes))
    with observer(SCHEDULE):
        local_loss = state.executor.train(passes, buffers.check_stage, observer) / loss_copies(model)
    with observer(GRADS):
        buffers.reduce_grads()
        local = torch.stack((local_loss, buffers.square_norm(), torch.full_like(local_loss, stop_requested)))
        loss, square, stop_requests = model.comm.all_reduce(local, model.comm.mesh.names).wait()
    grad_norm = scale.unscale(square.sqrt())
    before_update()
    with observer(UPDATE):
        skipped = state.optimizer.step(grad_norm, lr)
    state.iteration += 1
    state.consumed_samples += settings.num_samples
    return StepResult(loss, grad_norm, skipped, stop_requests)


def valid_tokens(model: GPT, microbatches: Sequence[Microbatch], settings: StepSettings) -> int | Tensor:
    """Return the tokens of the global batch that count in the loss; an all-reduced count if `packing` masks some."""
    if not settings.packing.masks_loss:
        return settings.num_tokens
    mesh = model.comm.mesh
    counts = [(settings.packing.labels(batch.tokens) >= 0).sum() for batch in microbatches]
    readers = num_copies((DATA + model.mode.batch_axes,), mesh, mesh.names)
    count = torch.stack(counts).sum().to(model.zeros().dtype) / readers
    return model.comm.all_reduce(count, mesh.names).wait().clamp(min=1)


def loss_copies(model: GPT) -> int:
    """Return the number of ranks that compute the same part of the loss."""
    return num_copies((DATA + model.mode.inner[0],), model.comm.mesh, (*DATA, *dict(model.mode.axes)))
