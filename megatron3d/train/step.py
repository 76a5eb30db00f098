"""One training step: pure tensor code, without a clock, a print or a branch on a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.layout import num_copies
from megatron3d.mesh import DATA
from megatron3d.model.gpt import GPT
from megatron3d.pipeline.engine import Watch, unwatched
from megatron3d.train.state import TrainState


@dataclass(frozen=True)
class Settings:
    """What is the same in every step; `num_tokens` are the valid tokens of a global batch."""

    seed: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True)
class StepResult:
    """Of the whole world, on every rank.

    Attributes:
        loss: mean over the tokens of the global batch.
        grad_norm: before clipping.
        skipped: 1.0 if a gradient was not finite and nothing was updated, else 0.0.
        stop_requests: ranks that were asked to stop before this step.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    stop_requests: Tensor


def train_step(
    state: TrainState,
    microbatches: Sequence[Microbatch],
    lr: float,
    settings: Settings,
    stop_requested: bool = False,
    watch: Watch = unwatched,
) -> StepResult:
    """Forward and backward over the microbatches, reduce, clip, update; the state moves on by one iteration."""
    model, buffers, key, scale = state.model, state.buffers, (settings.seed, state.iteration), state.loss_scale
    passes = [
        model.begin(batch.tokens, settings.num_tokens, batch.first_sample, key, scale.factor) for batch in microbatches
    ]
    buffers.begin_step(len(passes))
    share = state.flow.train(passes, buffers.check_stage, watch) / loss_copies(model)
    buffers.reduce_grads()
    shares = torch.stack((share, buffers.square_norm(), torch.full_like(share, stop_requested)))
    loss, square, stop_requests = model.comm.all_reduce(shares, model.comm.mesh.names).wait()
    grad_norm = scale.unscale(square.sqrt())
    skipped = state.optimizer.step(grad_norm, lr)
    state.iteration += 1
    state.consumed_samples += settings.num_samples
    return StepResult(loss, grad_norm, skipped, stop_requests)


def loss_copies(model: GPT) -> int:
    """How many ranks hold the same share of the loss."""
    return num_copies((DATA + model.mode.inner[0],), model.comm.mesh, (*DATA, *dict(model.mode.axes)))
