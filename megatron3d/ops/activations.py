"""Activations of the MLP by name; those of `GATED` take gate and up projection [M, 2F], fused.

swiglu          silu(gate) up                                       (Shazeer 2020, arXiv:2002.05202)
squared_relu    relu(x)^2                                           (So et al. 2021, arXiv:2109.08668)
clamped_swiglu  g sigmoid(1.702 g) (1 + u),  g = min(gate, 7),  u = clamp(up, -7, 7)      (gpt-oss, 2025)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
_LIMIT, _STEEPNESS = 7.0, 1.702


def _gated(activation: Activation, fused_MF: Tensor) -> Tensor:
    gate, up = fused_MF.chunk(2, dim=-1)
    return activation(gate) * up


def _clamped_swiglu(fused_MF: Tensor) -> Tensor:
    gate, up = fused_MF.chunk(2, dim=-1)
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * torch.sigmoid(gate * _STEEPNESS) * (up + 1)


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x_MF: F.relu(x_MF).square(),
    "swiglu": partial(_gated, F.silu),
    "geglu": partial(_gated, F.gelu),
    "geglu_tanh": partial(_gated, partial(F.gelu, approximate="tanh")),
    "clamped_swiglu": _clamped_swiglu,
}
