"""One training step: pure tensor code, without a clock, a print or a branch on a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.layout import num_copies
from megatron3d.model.gpt import GPT
from megatron3d.model.params import DATA
from megatron3d.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Of the whole world, on every rank: loss of the global batch, gradient norm before clipping, 1.0 if skipped."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


def train_step(state: TrainState, microbatches: Sequence[Microbatch], num_tokens: int, seed: int, lr: float) -> StepResult:
    """Forward and backward over the microbatches, reduce, clip, update.  `num_tokens` are those of the global batch."""
    model, buffers = state.model, state.buffers
    buffers.zero_grad()
    losses = []
    for index, batch in enumerate(microbatches):
        if index == len(microbatches) - 1:
            buffers.last_microbatch()
        loss = model(batch.tokens, num_tokens, batch.first_sample, (seed, state.iteration))
        loss.backward()
        losses.append(loss.detach())
    buffers.reduce_grads()
    share = torch.stack(losses).sum() / loss_copies(model)
    loss, square = model.comm.all_reduce(torch.stack((share, buffers.square_norm())), model.comm.mesh.names).wait()
    grad_norm = square.sqrt()
    return StepResult(loss, grad_norm, state.optimizer.step(grad_norm, lr))


def loss_copies(model: GPT) -> int:
    """How many ranks hold the same share of the loss."""
    return num_copies((DATA + model.mode.inner[0],), model.comm.mesh, model.comm.mesh.names)
