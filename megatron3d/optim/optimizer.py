"""AdamW over flat buffers, and the learning rate as a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.hardware.apex import adam_kernel
from megatron3d.optim.adamw import Group, Update, update_fused, update_in_pieces, update_with_apex
from megatron3d.optim.precision import LossScale
from megatron3d.zero import Buffers, FlatBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_DTYPES: Mapping[str | None, torch.dtype | None] = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer:
    """AdamW on every flat buffer, of whatever length; norms and biases are not decayed.

    Attributes:
        num_steps: updates made so far; skipped ones do not count.
    """

    def __init__(self, buffers: Buffers, config: OptimizerConfig, loss_scale: LossScale | None = None) -> None:
        self.buffers, self.config, self.loss_scale = buffers, config, loss_scale
        self._update = choose_update(config, buffers.flat_buffers)
        dtypes = [MOMENT_DTYPES[name] for name in (config.exp_avg_dtype, config.exp_avg_sq_dtype)]
        self._moments = [
            [torch.zeros_like(flat.main, dtype=dtype or flat.main.dtype) for dtype in dtypes]
            for flat in buffers.flat_buffers
        ]
        self.num_steps = torch.zeros((), device=next((flat.main.device for flat in buffers.flat_buffers), None))

    def moment(self, flat: FlatBuffer, which: str) -> Tensor:
        """AdamW's running average `which` (one of `MOMENTS`) of a flat buffer."""
        index = next(index for index, mine in enumerate(self.buffers.flat_buffers) if mine is flat)
        return self._moments[index][MOMENTS.index(which)]

    @property
    def num_bytes(self) -> int:
        """Memory of the moments."""
        return sum(moment.nbytes for moments in self._moments for moment in moments)

    def set_num_steps(self, num_steps: float) -> None:
        """Continue AdamW's bias correction at `num_steps`."""
        self.num_steps.fill_(num_steps)

    def step(self, grad_norm: Tensor, lr: float) -> Tensor:
        """Clip by the global norm and update; returns 1.0 where a non-finite gradient skipped the update, else 0.0.

        Args:
            grad_norm: of the gradients as they are without the loss scale; the buffers' have it, and lose it here.
        """
        factor = self._factor(grad_norm)
        if factor is not None:
            for flat in self.buffers.flat_buffers:
                flat.grad.mul_(factor)
        skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
        self.num_steps = self.num_steps.to(skipped.device)
        for group in self._groups():
            self._update(group, self.config, lr, self.num_steps, skipped)
        self.num_steps += 1 - skipped
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        self.buffers.publish()
        return skipped

    def _factor(self, grad_norm: Tensor) -> Tensor | None:
        """What clipping and the loss scale multiply gradients by; None where that is nothing."""
        clip_grad = self.config.clip_grad
        clipping = (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if clip_grad > 0 else None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        if not isinstance(scale, Tensor):
            return clipping
        return scale.reciprocal() if clipping is None else clipping / scale

    def _groups(self) -> tuple[Group, Group]:
        """What is decayed, and what is not."""
        groups = Group(self.config.weight_decay), Group(0.0)
        for flat, moments in zip(self.buffers.flat_buffers, self._moments, strict=True):
            for group, where in zip(groups, flat.decay_slices, strict=True):
                if where.start < where.stop:
                    for tensors, tensor in zip(group.lists, (flat.grad, flat.main, *moments), strict=True):
                        tensors.append(tensor[where])
        return groups


def choose_update(config: OptimizerConfig, flats: Sequence[FlatBuffer]) -> Update:
    """The fused kernel that is asked for; where moments and weights differ in type, the update in pieces.

    Raises UserError where apex is asked for and NVIDIA's is not there, or not for these flats' device.
    """
    main = {flat.main.dtype for flat in flats}
    moments = {MOMENT_DTYPES[name] for name in (config.exp_avg_dtype, config.exp_avg_sq_dtype)} - {None}
    if moments - main:
        return update_in_pieces
    if config.adam_implementation == "apex":
        return update_with_apex(adam_kernel({flat.main.device for flat in flats}))
    return update_fused


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """Rate of the update that makes `iteration` (counted from 1): linear warm-up, decay, and after it `min_lr`."""
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if iteration > end and config.lr_decay_style != "constant":
        return config.min_lr
    passed = (iteration - warmup) / (end - warmup)
    return _DECAY[config.lr_decay_style](config, passed, iteration, end)


def _inverse_square_root(config: OptimizerConfig, passed: float, iteration: int, end: int) -> float:
    return max(config.lr * math.sqrt(max(config.lr_warmup_iters, 1) / iteration), config.min_lr)


def _warmup_stable_decay(config: OptimizerConfig, passed: float, iteration: int, end: int) -> float:
    """Constant, then linear to min_lr over the last phase (Hu et al. 2024, arXiv:2404.06395)."""
    phase = config.lr_wsd_decay_iters or max(end // 10, 1)
    left = min((end - iteration) / phase, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * left


_DECAY: Mapping[str, Callable[[OptimizerConfig, float, int, int], float]] = {
    "constant": lambda c, passed, i, end: c.lr,
    "linear": lambda c, passed, i, end: c.lr - (c.lr - c.min_lr) * passed,
    "cosine": lambda c, passed, i, end: c.min_lr + (c.lr - c.min_lr) * (1 + math.cos(math.pi * passed)) / 2,
    "inverse-square-root": _inverse_square_root,
    "WSD": _warmup_stable_decay,
}
