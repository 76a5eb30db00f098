"""AdamW over flat buffers, and the learning rate as a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.zero import Buffers, Flat

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """torch's fused AdamW on every flat buffer; norms and biases are not decayed."""

    def __init__(self, buffers: Buffers, config: OptimizerConfig) -> None:
        self.buffers, self.clip_grad = buffers, config.clip_grad
        decay = {True: config.weight_decay, False: 0.0}
        self._adamw = torch.optim.AdamW(
            [{"params": [flat.main], "weight_decay": decay[flat.kind.decay]} for flat in buffers.flats],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for flat in buffers.flats:
            flat.main.grad = flat.grad
            self._adamw.state[flat.main] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.main.device),
                **{moment: torch.zeros_like(flat.main) for moment in MOMENTS},
            }

    def moment(self, flat: Flat, which: str) -> Tensor:
        """AdamW's running average `which` (one of `MOMENTS`) of a flat buffer."""
        state: Tensor = self._adamw.state[flat.main][which]
        return state

    @property
    def num_steps(self) -> Tensor:
        """Updates made so far; skipped ones do not count."""
        step: Tensor = self._adamw.state[self.buffers.flats[0].main]["step"]
        return step

    def set_num_steps(self, num_steps: float) -> None:
        """Continue AdamW's bias correction at `num_steps`."""
        for flat in self.buffers.flats:
            self._adamw.state[flat.main]["step"].fill_(num_steps)

    def step(self, grad_norm: Tensor, lr: float) -> Tensor:
        """Clip by the global norm and update; returns 1.0 where a non-finite gradient skipped the update, else 0.0."""
        if self.clip_grad > 0:
            scale = (self.clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
            for flat in self.buffers.flats:
                flat.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        self.buffers.publish()
        return skipped


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
