"""Which numbers a run computes with, and the loss scale that keeps fp16's gradients representable.

    gradients of  scale * loss  in fp16,  summed in fp32,  times  clipping / scale  once, before the update

(Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.)  The dynamic scale is Megatron's: `hysteresis` non-finite
steps halve it, and so does each further one, until `loss_scale_window` good steps in a row double it.  It is tensors
only, so that no step waits for a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.config.schema import TrainConfig

GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True)
class Precision:
    """The network's type, the type of sums, of the optimizer's weights and of its arithmetic, and whether the network's
    exponents are so few that the loss is scaled."""

    model: torch.dtype
    main: torch.dtype
    scales_loss: bool = False


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, scales_loss=True),
    "fp64": Precision(torch.float64, torch.float64),
}


class LossScale:
    """What the loss is multiplied by in backward: 1 and free of cost, but for fp16.

    Attributes:
        factor: 1.0 where nothing is scaled, else a scalar tensor, changed in place by `update`.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self._config = config
        self.factor: Tensor | float = 1.0
        self._counters: dict[str, Tensor] = {}
        if not PRECISIONS[config.precision].scales_loss:
            return
        self.factor = torch.tensor(config.loss_scale or config.initial_loss_scale, device=device)
        if config.loss_scale is None:
            self._counters = {
                "growth_tracker": torch.zeros((), device=device),
                "hysteresis_tracker": torch.tensor(float(config.hysteresis), device=device),
            }

    @property
    def value(self) -> float | None:
        """The factor, which waits for the device; None where nothing is scaled."""
        return float(self.factor) if isinstance(self.factor, Tensor) else None

    def unscale(self, norm: Tensor) -> Tensor:
        """The norm of the gradients from that of the scaled ones."""
        return norm / self.factor if isinstance(self.factor, Tensor) else norm

    def update(self, found_nonfinite: Tensor) -> None:
        """Move a dynamic scale on by a step whose scaled gradients were not all finite (nonzero) or were (0)."""
        if not self._counters:
            return
        config, scale, found = self._config, torch.as_tensor(self.factor), found_nonfinite != 0
        growth, hysteresis = self._counters.values()
        left = hysteresis - 1
        shrunk = torch.where(left <= 0, (scale * BACKOFF).clamp(min=config.min_loss_scale), scale)
        grows = growth + 1 >= config.loss_scale_window
        grown = torch.where(grows, scale * GROWTH, scale)
        restored = torch.where(grows, torch.full_like(hysteresis, config.hysteresis), hysteresis)
        scale.copy_(torch.where(found, shrunk, grown))
        growth.copy_(torch.where(found | grows, torch.zeros_like(growth), growth + 1))
        hysteresis.copy_(torch.where(found, left, restored))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, scalars by name; nothing where the scale never changes."""
        return {"scale": torch.as_tensor(self.factor), **self._counters} if self._counters else {}

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue from a `state`.  Without one, as from a run in another precision, a dynamic scale begins anew; a
        fixed one is the configuration's."""
        for name, value in self.state().items() if saved else ():
            value.fill_(saved[name])
