"""Precisions of training, and the loss scale of fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    gradients of  scale * loss  in fp16,  accumulated in fp32,  times  clipping / scale  once, before the update

The dynamic scale is Megatron's: after `hysteresis` non-finite steps it is halved, and again by each further one, until
`loss_scale_window` finite steps in a row double it.  It consists of tensors only, so that no step waits for a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron3d.config.schema import TrainConfig
from megatron3d.errors import UserError

# Dtype of weights and activations; main_grad, master weights and the optimizer's arithmetic are in fp32 or wider.
PRECISIONS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
# The precision whose exponent range requires loss scaling.
SCALED = "fp16"
GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Factor of the loss in backward; 1.0, at no cost, in precisions other than fp16.

    Attributes:
        factor: 1.0 without scaling, else a scalar tensor that `update` changes in place.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self._config = config
        self.factor: Tensor | float = 1.0
        self._counters: dict[str, Tensor] = {}
        if config.precision != SCALED:
            return
        self.factor = torch.tensor(config.loss_scale or config.initial_loss_scale, device=device)
        if config.loss_scale is None:
            self._counters = {
                "growth_tracker": torch.zeros((), device=device),
                "hysteresis_tracker": torch.tensor(float(config.hysteresis), device=device),
            }

    @property
    def value(self) -> float | None:
        """The factor as a number, which synchronizes with the device; None without scaling."""
        return float(self.factor) if isinstance(self.factor, Tensor) else None

    def unscale(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients, a scalar, given the norm of the scaled gradients."""
        return norm / self.factor if isinstance(self.factor, Tensor) else norm

    def update(self, found_nonfinite: Tensor) -> None:
        """Update a dynamic scale after a step; `found_nonfinite` is nonzero where a scaled gradient was not finite."""
        if not self._counters:
            return
        config, scale = self._config, torch.as_tensor(self.factor)
        found = found_nonfinite != 0
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
        """Return the scalars that a checkpoint stores, by name; none where the scale is constant."""
        return {"scale": torch.as_tensor(self.factor), **self._counters} if self._counters else {}

    def load(self, saved: Mapping[str, float]) -> None:
        """Restore a `state`; a constant scale keeps its configured value.

        If `saved` is empty, as from a run in another precision, a dynamic scale starts from its initial value.
        Raises UserError where it is incomplete.
        """
        if saved and (saved.get("scale", 0.0) <= 0 or not saved.keys() >= self._counters.keys()):
            raise UserError(
                f"loss_scale={dict(saved)} of the checkpoint is no scale above 0 with its counters; load another "
                "checkpoint, or set checkpoint.no_load_optim=true"
            )
        for name, value in self.state().items() if saved else ():
            value.fill_(saved[name])
