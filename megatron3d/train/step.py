"""One training step: pure tensor code without a clock, a print or a host branch on a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.data.packing import PLAIN, Packing
from megatron3d.metrics.timers import BATCH, GRADS, SCHEDULE, UPDATE
from megatron3d.model.gpt import GPT
from megatron3d.model.microbatch import Pass
from megatron3d.model.router_state import RouterCounts
from megatron3d.parallel.layout import num_copies
from megatron3d.parallel.mesh import DATA
from megatron3d.pipeline.engine import Observer, PipelineExecutor, no_observer
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
        loss: mean over the tokens of the global batch, in nats, of the next token only.
        grad_norm: global norm of the gradients before clipping.
        skipped: 1.0 if a gradient was not finite and nothing was updated, else 0.0.
        stop_requests: number of ranks that were asked to stop before this step.
        mtp_losses: mean of each module of multi-token prediction over its own tokens [modules].
        routers: what routers counted; None where they did not.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    stop_requests: Tensor
    mtp_losses: Tensor
    routers: RouterCounts | None = None


@dataclass(frozen=True)
class HostNumbers:
    """Numbers of a `StepResult` on the host."""

    loss: float
    skipped: bool
    stop_requests: int


class Readout:
    """Copy of a step's numbers to the host, enqueued right after the step.

    A number that is read from the device itself is copied after everything that is enqueued by then: read one step
    later, the host would wait for that step as well, and the device then for the host.
    """

    def __init__(self, result: StepResult) -> None:
        numbers = torch.stack((result.loss, result.skipped, result.stop_requests))
        self._here = torch.empty_like(numbers, device="cpu", pin_memory=numbers.device.type != "cpu")
        self._here.copy_(numbers, non_blocking=True)
        self._end = None if numbers.device.type == "cpu" else torch.Event(numbers.device)
        if self._end is not None:
            self._end.record()

    def read(self) -> HostNumbers:
        """Wait for the step, but for nothing that was enqueued after it, and return its numbers."""
        if self._end is not None:
            self._end.synchronize()
        loss, skipped, stop_requests = self._here.tolist()
        return HostNumbers(loss, bool(skipped), int(stop_requests))


def train_step(
    state: TrainState,
    microbatches: Sequence[Microbatch],
    lr: float,
    settings: StepSettings,
    *,
    weight_decay: float | None = None,
    stop_requested: bool = False,
    observer: Observer = no_observer,
    before_update: Callable[[], None] = lambda: None,
    watches_routers: bool = False,
) -> StepResult:
    """Run forward and backward over the microbatches, reduce the gradients, clip and update; advance the state.

    Args:
        weight_decay: factor of the learning rate by which weights decay; None: the configured one.
        before_update: called before the first change of weights and moments is enqueued.
        watches_routers: routers count, also where nothing in the step needs it.
    """
    model, buffers, scale = state.model, state.buffers, state.loss_scale
    passes = begin_passes(state, microbatches, settings, observer)
    buffers.begin_step(len(passes))
    model.routers.begin_step(watches_routers)
    with observer(SCHEDULE):
        local_losses = state.executor.train(passes, buffers.check_stage, observer) / loss_copies(model)
    with observer(GRADS):
        buffers.reduce_grads()
        square = buffers.square_norm()
        local = torch.cat((local_losses, torch.stack((square, torch.full_like(square, stop_requested)))))
        loss, *mtp_losses, square, stop_requests = model.comm.all_reduce(local, model.comm.mesh.names).wait()
        counts = model.routers.reduce(model.comm)
    grad_norm = scale.unscale(square.sqrt())
    before_update()
    state.update.begin()
    with observer(UPDATE):
        skipped = state.optimizer.step(grad_norm, lr, weight_decay, state.iteration)
        model.routers.update(counts, skipped)
    state.iteration += 1
    state.consumed_samples += settings.num_samples
    state.update.end()
    ahead = torch.stack(mtp_losses) if mtp_losses else local[:0]
    return StepResult(loss, grad_norm, skipped, stop_requests, ahead, counts)


def begin_passes(
    state: TrainState,
    microbatches: Sequence[Microbatch],
    settings: StepSettings,
    observer: Observer = no_observer,
) -> list[Pass]:
    """Return the passes of the next step's microbatches, or of some of them that make a batch of their own."""
    model = state.model
    with observer(BATCH):
        num_tokens, *num_ahead = valid_tokens(model, microbatches, settings)
    return [
        model.begin(
            batch.tokens,
            num_tokens,
            batch.first_sample,
            key=(settings.seed, state.iteration),
            loss_scale=state.loss_scale.factor,
            packing=settings.packing,
            starts=batch.starts,
            all_tokens=settings.num_tokens,
            num_ahead=num_ahead,
        )
        for batch in microbatches
    ]


def valid_tokens(model: GPT, microbatches: Sequence[Microbatch], settings: StepSettings) -> list[int | Tensor]:
    """Return the tokens of the global batch that count in the loss, and in that of each module that predicts ahead.

    If `packing` masks some, they are all-reduced counts.
    """
    packing, mesh = settings.packing, model.comm.mesh
    places = range(1 + model.arch.mtp_num_layers)
    if not packing.masks_ahead(places[-1]):
        return unmasked_tokens(model, microbatches, settings)
    counts = [[(packing.labels(batch.tokens, each) >= 0).sum() for batch in microbatches] for each in places]
    readers = num_copies((DATA + model.mode.batch_axes,), mesh, mesh.names)
    count = torch.stack([torch.stack(each).sum() for each in counts]).to(model.zeros().dtype) / readers
    return list(model.comm.all_reduce(count, mesh.names).wait().clamp(min=1))


def unmasked_tokens(model: GPT, microbatches: Sequence[Microbatch], settings: StepSettings) -> list[int | Tensor]:
    """Return the tokens whose labels lie in their sequence: for each place further one less per sequence."""
    num_sequences = settings.num_tokens // (microbatches[0].tokens.shape[1] - 1)
    return [settings.num_tokens - places * num_sequences for places in range(1 + model.arch.mtp_num_layers)]


def loss_copies(model: GPT) -> int:
    """Return the number of ranks that compute the same part of the loss."""
    return num_copies((DATA + model.mode.inner[0],), model.comm.mesh, (*DATA, *dict(model.mode.axes)))


def evaluate(executor: PipelineExecutor, batches: Iterable[Sequence[Microbatch]], settings: StepSettings) -> Tensor:
    """Return the mean losses per token [1 + modules] of global batches with `settings.num_tokens` tokens in total.

    The losses of the modules of multi-token prediction follow the model's.
    """
    model, packing = executor.model, settings.packing
    losses, counts = [], []
    divisors: list[int | Tensor] = []
    for microbatches in batches:
        num_tokens, *num_ahead = divisors = unmasked_tokens(model, microbatches, settings)
        passes = [
            model.begin(
                batch.tokens, num_tokens, batch.first_sample, packing=packing, starts=batch.starts, num_ahead=num_ahead
            )
            for batch in microbatches
        ]
        losses.append(executor.evaluate(passes))
        counts.append(valid_tokens(model, microbatches, settings))
    local_losses = torch.stack([each.sum() for each in torch.stack(losses).unbind(1)]) / loss_copies(model)
    reduced = model.comm.all_reduce(local_losses, model.comm.mesh.names).wait()
    if not packing.masks_ahead(model.arch.mtp_num_layers):
        return reduced
    factors = [divisor / sum(found) for divisor, found in zip(divisors, zip(*counts, strict=True), strict=True)]
    return torch.stack([loss * factor for loss, factor in zip(reduced, factors, strict=True)])
