"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on flat tensors, as functions of one signature, `Update`.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w)

If `skipped` is not 0, nothing changes; no value is read on the host.  Moments in bf16 are rounded stochastically: with
rounding to nearest and b2 = 0.999, v would never decrease, since a thousandth is less than half a unit in bf16's last
place.  The random bits are a hash of the step and of the leading bits of the element's weight and gradient, so that
they do not depend on how the tensor is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron3d.config.schema import OptimizerConfig
from megatron3d.hardware.apex import adam_kernel
from megatron3d.runtime.machine import has_triton


@dataclass
class ParamGroup:
    """Tensors with the same weight decay; entries of the lists at the same index have the same shape.

    Attributes:
        states: a list for each state tensor of the rule.
        factor: scalar that clips and unscales the gradients: an update that is not skipped multiplies them by it, in
            the kernel that reads them.  None: 1.
        iteration: steps of the run before this one, skipped updates included, as the host knows them.
    """

    weight_decay: float
    mains: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: tuple[list[Tensor], ...] = ()
    factor: Tensor | None = None
    iteration: int = 0

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Gradients, master weights and states: the order that apex's kernels take."""
        return self.grads, self.mains, *self.states


# Arguments of an update: group, config, learning rate, number of earlier updates, skipped (a tensor of 0 or 1).  If
# `skipped` is not 0, nothing changes.
Update = Callable[[ParamGroup, OptimizerConfig, float, Tensor, Tensor], None]
# Returns the update of a rule by its configured kernel, given this rank's master weights and state tensors.
ChooseUpdate = Callable[[OptimizerConfig, Sequence[Tensor], Sequence[Tensor]], Update]
# Elements that `update_chunked` updates at once: on a CPU they fit a core's cache, on a GPU they amortize launches.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**22
_MAX_KERNEL_SIZE = 2**30
LOW_HALF = 0 if sys.byteorder == "little" else 1


@torch.no_grad()
def update_fused(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    """Update with torch's fused kernel; the moments must have the weights' dtype."""
    exp_avgs, exp_avg_sqs = group.states
    divisor = None
    if group.factor is not None and group.grads:
        if takes_divisor(group.grads[0]):
            divisor = group.factor.reciprocal()
        else:
            torch._foreach_mul_(group.grads, group.factor)
    adamw(
        group.mains,
        group.grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs=[],
        state_steps=[num_steps.clone() for _ in group.mains],
        fused=True,
        grad_scale=divisor,
        found_inf=skipped,
        amsgrad=False,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        lr=lr,
        weight_decay=group.weight_decay,
        eps=config.adam_eps,
        maximize=False,
    )


def takes_divisor(grad: Tensor) -> bool:
    """Return whether the fused kernel scales gradients, by a divisor in fp32; on a CPU a pass of its own is faster.

    On Zen 4 the kernel takes 70 ms for 34M elements with a divisor, and 50 ms with a multiplication before it.
    """
    return grad.device.type != "cpu" and grad.dtype == torch.float32


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
            torch.ones_like(num_steps) if group.factor is None else group.factor,
        )

    return update


@torch.no_grad()
def update_with_triton(
    group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor
) -> None:
    """Update fp32 weights like `update_chunked`, by one kernel per flat tensor and without a workspace."""
    from megatron3d.optim.triton_adamw import update_tensor

    step = num_steps.double() + 1
    rate, correction = lr / (1 - config.adam_beta1**step), 1 - config.adam_beta2**step
    clip = torch.ones_like(rate) if group.factor is None else group.factor
    scalars = torch.stack([each.to(rate.dtype) for each in (rate, correction, skipped, clip)]).float()
    factors = 1 - lr * group.weight_decay, config.adam_beta1, config.adam_beta2, config.adam_eps
    for tensors in zip(*group.lists, strict=True):
        update_tensor(tensors, scalars, _salt(num_steps), factors, scales_grads=group.factor is not None)


@torch.no_grad()
def update_chunked(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
    """Update chunk by chunk, with moments of any dtype, arithmetic in the weights' dtype, and a small workspace."""
    step = num_steps.double() + 1
    rate, correction = lr / (1 - config.adam_beta1**step), 1 - config.adam_beta2**step
    factors = 1 - lr * group.weight_decay, rate, correction
    salt, is_skipped = _salt(num_steps), skipped != 0
    factor = None if group.factor is None else torch.where(is_skipped, 1.0, group.factor)
    for tensors in zip(*group.lists, strict=True):
        size = CPU_CHUNK if tensors[0].device.type == "cpu" else GPU_CHUNK
        for g, w, m, v in zip(*(t.split(size) for t in tensors), strict=True):
            if factor is not None:
                g.mul_(factor)
            _update_chunk(g, w, m, v, config, factors, salt=salt, is_skipped=is_skipped)


# Update by the name of its kernel, given the devices of the weights.
KERNELS: Mapping[str, Callable[[set[torch.device]], Update]] = {
    "torch": lambda devices: update_fused,
    "apex": lambda devices: update_with_apex(adam_kernel(devices)),
    "triton": lambda devices: update_with_triton,
    "chunked": lambda devices: update_chunked,
}


def choose_update(config: OptimizerConfig, mains: Sequence[Tensor], moments: Sequence[Tensor]) -> Update:
    """Return the configured fused kernel, or one that rounds where moments and weights differ in dtype.

    Raises UserError where apex is configured, but NVIDIA's is not installed or does not support the device.
    """
    name: str = config.adam_implementation
    main = {weights.dtype for weights in mains}
    if {moment.dtype for moment in moments} - main:
        on_gpus = all(weights.is_cuda for weights in mains)
        name = "triton" if on_gpus and main == {torch.float32} and has_triton() else "chunked"
    return KERNELS[name]({weights.device for weights in mains})


def _update_chunk(
    g: Tensor,
    w: Tensor,
    m: Tensor,
    v: Tensor,
    config: OptimizerConfig,
    factors: tuple[float, Tensor, Tensor],
    *,
    salt: Tensor,
    is_skipped: Tensor,
) -> None:
    """Update one chunk; at most five numbers of the weights' size are live per element."""
    new = _adamw_step(g, w, m, v, config, factors)
    noise = _random_bits(w, g, salt) if torch.bfloat16 in (m.dtype, v.dtype) else None
    for old, wide, shift in zip((w, m, v), new, (0, 0, 16), strict=True):
        if noise is None or old.dtype != torch.bfloat16:
            torch.where(is_skipped, old, wide.to(old.dtype), out=old)
        else:
            old_bits, new_bits = old.view(torch.int16), _round_stochastically(wide, noise, shift).view(torch.int16)
            torch.where(is_skipped, old_bits, new_bits, out=old_bits)  # a third less time than in bf16
            del new_bits  # otherwise two of them would be live


def _adamw_step(
    g: Tensor, w: Tensor, m: Tensor, v: Tensor, config: OptimizerConfig, factors: tuple[float, Tensor, Tensor]
) -> Sequence[Tensor]:
    """Return new weights and moments, in the weights' dtype.

    Args:
        factors: factor of the weights by weight decay, corrected learning rate, and correction of the second moment.
    """
    decay, rate, correction = factors
    m = torch.lerp(m.to(w.dtype), g, 1 - config.adam_beta1)
    v = (v.to(w.dtype) * config.adam_beta2).addcmul_(g, g, value=1 - config.adam_beta2)
    root = (v / correction).sqrt_().add_(config.adam_eps)
    w = (w * decay).sub_((m * rate).div_(root))
    return w, m, v


def _salt(num_steps: Tensor) -> Tensor:
    """Return the number, different in each step, that is hashed with every element."""
    return num_steps.to(torch.int32) * 0x61C88647


def _random_bits(w: Tensor, g: Tensor, salt: Tensor) -> Tensor:
    """Hash a salt and the first 16 bits of weight and gradient to 32 bits per element (Wellons' lowbias32).

    A shift by 16 bits moves one half of a number to the other, which is one kernel and no workspace.
    """
    x = w.to(torch.float32, copy=True).view(torch.int32)
    low, high = _halves(x)
    low.copy_(_halves(g.float())[1])
    x += salt
    low ^= high
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_((1 << 32 - 15) - 1)
    x *= 0x846CA68B - 2**32
    low ^= high
    return x


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 16 bits of each element of a 1-D tensor of 32 bits, as views."""
    pairs = x.view(torch.int16)
    return pairs[LOW_HALF::2], pairs[1 - LOW_HALF :: 2]


def _round_stochastically(wide: Tensor, noise: Tensor, shift: int) -> Tensor:
    """Round stochastically to one of the two nearest bf16 numbers; 16 bits of `noise` from `shift` on decide."""
    low = (noise >> shift).bitwise_and_(0xFFFF) if shift else noise & 0xFFFF
    bits = low.add_(wide.float().view(torch.int32))
    return _halves(bits)[1].view(torch.bfloat16)
