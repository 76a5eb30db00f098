"""Learning-rate schedules: the learning rate as a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from megatron3d.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """Return the learning rate of `iteration` (counted from 1): linear warm-up, decay, then `min_lr`."""
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if iteration > end and config.lr_decay_style != "constant":
        return config.min_lr
    progress = (iteration - warmup) / (end - warmup)
    return _DECAY[config.lr_decay_style](config, progress, iteration, end)


def _inverse_square_root(config: OptimizerConfig, progress: float, iteration: int, end: int) -> float:
    return max(config.lr * math.sqrt(max(config.lr_warmup_iters, 1) / iteration), config.min_lr)


def _warmup_stable_decay(config: OptimizerConfig, progress: float, iteration: int, end: int) -> float:
    """Return the constant rate, or in the last phase its decay to min_lr (Hu et al. 2024, arXiv:2404.06395)."""
    phase = config.lr_wsd_decay_iters or max(end // 10, 1)
    remaining = min((end - iteration) / phase, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * _WSD_DECAY[config.lr_wsd_decay_style](remaining)


# Fraction of lr - min_lr by the remaining fraction of the decay phase, as in Megatron-LM; minus_sqrt is by Hägele et
# al. 2024, arXiv:2405.18392.
_WSD_DECAY: Mapping[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "exponential": lambda left: 2 * 0.5 ** (1 - left) - 1,
    "minus_sqrt": lambda left: 1 - math.sqrt(1 - left),
}
_DECAY: Mapping[str, Callable[[OptimizerConfig, float, int, int], float]] = {
    "constant": lambda c, progress, i, end: c.lr,
    "linear": lambda c, progress, i, end: c.lr - (c.lr - c.min_lr) * progress,
    "cosine": lambda c, progress, i, end: c.min_lr + (c.lr - c.min_lr) * (1 + math.cos(math.pi * progress)) / 2,
    "inverse-square-root": _inverse_square_root,
    "WSD": _warmup_stable_decay,
}
