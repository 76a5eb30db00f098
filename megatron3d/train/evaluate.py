"""Loss over held-out samples, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.pipeline.executor import PipelineExecutor
from megatron3d.train.step import Settings, loss_copies, valid_tokens


def evaluate(executor: PipelineExecutor, steps: Iterable[Sequence[Microbatch]], settings: Settings) -> Tensor:
    """Mean loss per token; `settings.num_tokens` are those of all the steps together."""
    model, packing, num_tokens = executor.model, settings.packing, settings.num_tokens
    shares, counts = [], []
    for step in steps:
        passes = [model.begin(batch.tokens, num_tokens, batch.first_sample, packing=packing) for batch in step]
        shares.append(executor.evaluate(passes))
        counts.append(valid_tokens(model, step, settings))
    share = torch.stack(shares).sum() / loss_copies(model)
    loss = model.comm.all_reduce(share, model.comm.mesh.names).wait()
    return loss * (num_tokens / sum(counts)) if packing.masks_loss else loss
