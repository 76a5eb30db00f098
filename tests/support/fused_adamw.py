"""Compare the Triton kernel of AdamW with `update_chunked`, and compile it: `python -m tests.support.fused_adamw X`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim import triton_adamw
from megatron3d.optim.adamw import ParamGroup, Update, update_chunked, update_with_triton
from tests.support.triton_process import assemble

SIZES = (2500, 0, 1, 1024)
CONFIG = OptimizerConfig(adam_eps=1e-6)


def random(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def updated(update: Update, dtypes: tuple[torch.dtype, torch.dtype]) -> list[list[Tensor]]:
    """Return weights and moments after four updates, of which the third is skipped and the second and fourth clip."""
    group = ParamGroup(0.3, states=([], []))
    for seed, size in enumerate(SIZES):
        for tensors, dtype in zip(group.lists, (torch.float32, torch.float32, *dtypes), strict=True):
            tensors.append(random(size, seed).square().to(dtype))
    num_steps = torch.zeros(())
    for step, skipped in enumerate((0.0, 0.0, 1.0, 0.0)):
        for seed, grad in enumerate(group.grads):
            grad.copy_(random(len(grad), 10 * step + seed) if not skipped else torch.full_like(grad, torch.inf))
        group.factor = torch.tensor(0.3) if step % 2 else None
        update(group, CONFIG, 0.1, num_steps, torch.tensor(skipped))
        num_steps = num_steps + 1 - skipped
    return list(group.lists[1:])


def interpret() -> dict[str, float]:
    """Return how weights and moments differ: fp32 by the largest relative error, bf16 by the share of its elements.

    A weight that differs in its last bit can change the hash of the next step.
    """
    found = {}
    for dtypes in product((torch.float32, torch.bfloat16), repeat=2):
        pairs = zip(updated(update_with_triton, dtypes), updated(update_chunked, dtypes), strict=True)
        for name, (fused, slow) in zip(("weights", "first", "second"), pairs, strict=True):
            a, b = torch.cat(fused).double(), torch.cat(slow).double()
            is_wide = fused[0].dtype == torch.float32
            differs = (a - b).abs().max() / b.abs().max() if is_wide else (a != b).double().mean()
            found[f"{name} with {dtypes}"] = differs.item()
    return found


def compiled() -> dict[str, str]:
    """Return the PTX for moments in bf16 by compute capability."""
    pointers = {"grads": "*fp32", "mains": "*fp32", "exp_avgs": "*i16", "exp_avg_sqs": "*i16", "scalars": "*fp32"}
    numbers = {"salt": "*i32", "numel": "i32", "decay": "fp32", "beta1": "fp32", "beta2": "fp32", "eps": "fp32"}
    constants = {"FIRST_IS_BF16": True, "SECOND_IS_BF16": True, "SCALES_GRADS": True, "BLOCK": triton_adamw.BLOCK}
    kernel, options = triton_adamw.adamw_kernel, triton_adamw.OPTIONS
    return {str(sm): assemble(kernel, {**pointers, **numbers}, constants, options, sm) for sm in (80, 90)}


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {"interpret": interpret, "assemble": compiled}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
