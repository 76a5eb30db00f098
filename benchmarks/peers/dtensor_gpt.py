"""The plain GPT under torch's own tensor and sequence parallelism: `parallelize_module` over DTensor.

The plan is that of torch's tutorial: column-parallel into the heads and the FFN, row-parallel out of them, norms on
shards of the sequence, embedding and head sharded over the vocabulary, loss_parallel instead of gathered logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common.shapes import LR
from peers.plain_gpt import PlainGPT, plain_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def parallelized(model: PlainGPT, mesh: DeviceMesh) -> PlainGPT:
    """Shard `model` over the ranks of `mesh`; every rank passes the same full weights."""
    _regroup_heads(model, mesh.size())
    parallelize_module(model, mesh, _plan(len(model.h)))
    model.lm_head.weight = model.wte.weight
    return model


def _plan(num_layers: int) -> dict[str, ParallelStyle]:
    tokens = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, use_local_output=False),
    }
    for block in (f"h.{index}" for index in range(num_layers)):
        plan |= {
            f"{block}.ln_1": SequenceParallel(),
            f"{block}.attn": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
            f"{block}.attn.c_attn": ColwiseParallel(),
            f"{block}.attn.c_proj": RowwiseParallel(output_layouts=tokens),
            f"{block}.ln_2": SequenceParallel(),
            f"{block}.mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
            f"{block}.mlp.c_fc": ColwiseParallel(),
            f"{block}.mlp.c_proj": RowwiseParallel(output_layouts=tokens),
        }
    return plan


def _regroup_heads(model: PlainGPT, num_ranks: int) -> None:
    """Order the rows of each q|k|v matrix so that an even split gives every rank its heads of all three."""
    for name, param in model.named_parameters():
        if ".c_attn." in name:
            rows = param.detach().unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2)
            param.data = rows.clone()


def dtensor_step(model: PlainGPT, fused: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a step of forward, backward, clipping and AdamW; the loss is complete on every rank."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused or None)

    def step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            loss = plain_loss(model, tokens)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        whole: Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return whole.detach()

    return step
