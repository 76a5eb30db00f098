"""Loss over held-out samples, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.model.gpt import GPT
from megatron3d.train.step import loss_copies


@torch.no_grad()
def evaluate(model: GPT, steps: Iterable[Sequence[Microbatch]], num_tokens: int) -> Tensor:
    """Mean loss per token; `num_tokens` are those of all the steps together."""
    shares = [model(batch.tokens, num_tokens, batch.first_sample) for step in steps for batch in step]
    share = torch.stack(shares).sum() / loss_copies(model)
    return model.comm.all_reduce(share, model.comm.mesh.names).wait()
