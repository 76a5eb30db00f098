"""Loss over held-out samples, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron3d.data.loader import Microbatch
from megatron3d.train.flow import Flow
from megatron3d.train.step import loss_copies


def evaluate(flow: Flow, steps: Iterable[Sequence[Microbatch]], num_tokens: int) -> Tensor:
    """Mean loss per token; `num_tokens` are those of all the steps together."""
    model = flow.model
    shares = [
        flow.evaluate([model.begin(batch.tokens, num_tokens, batch.first_sample) for batch in step]) for step in steps
    ]
    share = torch.stack(shares).sum() / loss_copies(model)
    return model.comm.all_reduce(share, model.comm.mesh.names).wait()
