"""Lion (Chen et al. 2023, arXiv:2302.06675) on flat tensors: nearly the sign of an interpolated momentum.

    c = b1 m + (1 - b1) g          w = w - lr (clamp(c / eps, -1, 1) + weight_decay w)          m = b2 m + (1 - b2) g

Gradients that are 0 but for rounding, as those of key biases, have a sign that differs between layouts: eps keeps their
updates small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim.adamw import CPU_CHUNK, GPU_CHUNK, ParamGroup, Update


@torch.no_grad()
def update_with_lion(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    """Update chunk by chunk; if `skipped` is not 0, nothing changes."""
    is_skipped = skipped != 0
    for tensors in zip(*group.lists, strict=True):
        size = CPU_CHUNK if tensors[0].device.type == "cpu" else GPU_CHUNK
        for g, w, m in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            direction = torch.lerp(g, m, config.lion_beta1).div_(config.lion_eps).clamp_(-1, 1)
            direction.add_(w, alpha=group.weight_decay)
            torch.where(is_skipped, w, w.sub(direction, alpha=lr), out=w)
            torch.where(is_skipped, m, torch.lerp(g, m, config.lion_beta2), out=m)


def choose_lion(config: OptimizerConfig, mains: Sequence[Tensor], states: Sequence[Tensor]) -> Update:
    """Return the update, which has one kernel for all devices."""
    return update_with_lion
