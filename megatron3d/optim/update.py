"""Signature of an update: tensors of parameters with the same weight decay, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron3d.config.schema import OptimizerConfig


@dataclass
class ParamGroup:
    """Tensors with the same weight decay; entries of the lists at the same index have the same shape.

    Attributes:
        states: a list for each state tensor of the rule.
    """

    weight_decay: float
    mains: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: tuple[list[Tensor], ...] = ()

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Gradients, master weights and states: the order that apex's kernels take."""
        return self.grads, self.mains, *self.states


# Arguments of an update: group, config, learning rate, number of earlier updates, skipped (a tensor of 0 or 1).  If
# `skipped` is not 0, nothing changes.
Update = Callable[[ParamGroup, OptimizerConfig, float, Tensor, Tensor], None]
# Returns the update of a rule by its configured kernel, given this rank's master weights and state tensors.
ChooseUpdate = Callable[[OptimizerConfig, Sequence[Tensor], Sequence[Tensor]], Update]
