"""The MLP of a layer, for every layout.

Letters: M tokens, H hidden, F inner features.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from megatron3d.model.linears import FC1, FC2
from megatron3d.model.microbatch import Pass
from megatron3d.model.modules import Build, Linear
from megatron3d.model.recompute_spec import MLP_ACT
from megatron3d.ops.activations import ACTIVATIONS
from megatron3d.ops.recompute import recompute_from_input


class MLP(nn.Module):
    """MLP [M, H] -> [M, H]: up (and gate) projection, activation, down projection."""

    def __init__(self, layer: str, build: Build, fc1: str = FC1, fc2: str = FC2) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[build.arch.activation]
        self.fc1 = Linear(layer, fc1, build)
        self.fc2 = Linear(layer, fc2, build)
        self.recomputes_activation = build.recompute.recomputes(MLP_ACT)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        y_MF = self.fc1(x_MH)
        a_MF = self.activation(y_MF)
        with recompute_from_input(self.activation, y_MF, a_MF) if self.recomputes_activation else nullcontext():
            y_MH: Tensor = self.fc2(a_MF)
        return y_MH
