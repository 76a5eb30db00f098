"""Evaluation: mean loss over held-out samples, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.pipeline.executor import PipelineExecutor
from megatron3d.train.step import StepSettings, loss_copies, unmasked_tokens, valid_tokens


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
