"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on flat tensors, as three functions with the same signature.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w)

If `skipped` is not 0, nothing changes; no value is read on the host.  Moments in bf16 are rounded stochastically: with
rounding to nearest and b2 = 0.999, v would never decrease, since a thousandth is less than half a unit in bf16's last
place.  The random bits are a hash of the step and of the leading bits of the element's weight and gradient, so that
they do not depend on how the tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron3d.config.schema import OptimizerConfig

# Elements that `update_chunked` updates at once: on a CPU they fit a core's cache, on a GPU they amortize launches.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**22
_MAX_KERNEL_SIZE = 2**30


@dataclass
class ParamGroup:
    """Flat tensors with the same weight decay; entries of the lists at the same index have the same shape."""

    weight_decay: float
    mains: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)

    @property
    def lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients, master weights, first and second moments: the order that apex's kernel takes."""
        return self.grads, self.mains, self.exp_avgs, self.exp_avg_sqs


# Arguments of an update: group, config, learning rate, number of earlier updates, skipped (a tensor of 0 or 1).
Update = Callable[[ParamGroup, OptimizerConfig, float, Tensor, Tensor], None]


@torch.no_grad()
def update_fused(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    """Update with torch's fused kernel; the moments must have the weights' dtype."""
    adamw(
        group.mains,
        group.grads,
        group.exp_avgs,
        group.exp_avg_sqs,
        max_exp_avg_sqs=[],
        state_steps=[num_steps.clone() for _ in group.mains],
        fused=True,
        found_inf=skipped,
        amsgrad=False,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        lr=lr,
        weight_decay=group.weight_decay,
        eps=config.adam_eps,
        maximize=False,
    )


def update_with_apex(kernel: Callable[..., None]) -> Update:
    """Return an update with apex's fused kernel `amp_C.multi_tensor_adam_capturable`, for fp32.

    apex.optimizers.FusedAdam uses this kernel as well, but its step count includes a skipped step until the next one.
    """

    def update(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
        lists = [[piece for t in ts if len(t) for piece in t.split(_MAX_KERNEL_SIZE)] for ts in group.lists]
        if not lists[0]:
            return
        kernel(
            2048 * 32,
            skipped.to(torch.int32).view(1),
            lists,
            torch.full_like(num_steps, lr),
            config.adam_beta1,
            config.adam_beta2,
            config.adam_eps,
            (num_steps + 1).to(torch.int32),
            1,  # decoupled weight decay
            1,  # bias correction
            group.weight_decay,
            torch.ones_like(num_steps),
        )

    return update


@torch.no_grad()
def update_chunked(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    """Update chunk by chunk, with moments of any dtype, arithmetic in the weights' dtype, and a small workspace."""
    step = num_steps.double() + 1
    corrections = 1 - config.adam_beta1**step, 1 - config.adam_beta2**step
    for tensors in zip(*group.lists, strict=True):
        size = CPU_CHUNK if tensors[0].device.type == "cpu" else GPU_CHUNK
        for g, w, m, v in zip(*(t.split(size) for t in tensors), strict=True):
            new = _adamw_step(g, w, m, v, config, lr, group.weight_decay, corrections)
            noise = _random_bits(w, g, num_steps) if torch.bfloat16 in (m.dtype, v.dtype) else None
            for old, wide, shift in zip((w, m, v), new, (0, 0, 16), strict=True):
                rounded = (
                    _round_stochastically(wide, noise >> shift)
                    if noise is not None and old.dtype == torch.bfloat16
                    else wide
                )
                old.copy_(torch.where(skipped != 0, old, rounded.to(old.dtype)))


def _adamw_step(
    g: Tensor,
    w: Tensor,
    m: Tensor,
    v: Tensor,
    config: OptimizerConfig,
    lr: float,
    weight_decay: float,
    corrections: tuple[Tensor, Tensor],
) -> Sequence[Tensor]:
    """Return new weights and moments, in the weights' dtype."""
    m = torch.lerp(m.to(w.dtype), g, 1 - config.adam_beta1)
    v = (v.to(w.dtype) * config.adam_beta2).addcmul_(g, g, value=1 - config.adam_beta2)
    root = (v / corrections[1]).sqrt_().add_(config.adam_eps)
    w = (w * (1 - lr * weight_decay)).sub_((m * (lr / corrections[0])).div_(root))
    return w, m, v


def _random_bits(w: Tensor, g: Tensor, num_steps: Tensor) -> Tensor:
    """Hash the step and the first 16 bits of weight and gradient to 32 bits per element (Wellons' lowbias32)."""
    w, g = (t.float().view(torch.int32) for t in (w, g))
    x = (w & -0x10000) | ((g >> 16) & 0xFFFF)
    x += num_steps.to(torch.int32) * 0x61C88647
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x ^= (x >> shift) & ((1 << 32 - shift) - 1)
        x *= factor
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _round_stochastically(wide: Tensor, noise: Tensor) -> Tensor:
    """Round stochastically to one of the two nearest bf16 numbers; 16 bits of `noise` decide."""
    bits = wide.float().view(torch.int32) + (noise & 0xFFFF)
    return (bits & -0x10000).view(torch.float32).bfloat16()
