"""Evaluation: mean loss over held-out samples, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.pipeline.executor import PipelineExecutor
from megatron3d.train.step import StepSettings, loss_copies, valid_tokens


def evaluate(executor: PipelineExecutor, batches: Iterable[Sequence[Microbatch]], settings: StepSettings) -> Tensor:
    """Return the mean loss per token of global batches with `settings.num_tokens` tokens in total."""
    model, packing = executor.model, settings.packing
    num_tokens = settings.num_tokens
    losses, counts = [], []
    for microbatches in batches:
        passes = [
            model.begin(batch.tokens, num_tokens, batch.first_sample, packing=packing, starts=batch.starts)
            for batch in microbatches
        ]
        losses.append(executor.evaluate(passes))
        counts.append(valid_tokens(model, microbatches, settings))
    local_loss = torch.stack(losses).sum() / loss_copies(model)
    loss = model.comm.all_reduce(local_loss, model.comm.mesh.names).wait()
    return loss * (num_tokens / sum(counts)) if packing.masks_loss else loss
