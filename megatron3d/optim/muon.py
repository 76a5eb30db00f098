"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, orthogonalized, of every logical matrix.

    m = mu m + (1 - mu) g          u = mu m + (1 - mu) g   (Nesterov; otherwise m)
    w = w - lr (scale(shape) NS(u) + weight_decay w)

NS(u) is near U V^T of u's singular value decomposition U S V^T: a few Newton-Schulz iterations of the whole matrix on
its home rank.  Orthogonalizing shards would be another optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim.adamw import ParamGroup, Update
from megatron3d.optim.homes import MatrixExchange, Round, Total
from megatron3d.parallel.layout import Shape

# Coefficients of the quintic iteration, which lifts small singular values fast, to between 0.7 and 1.2.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7
# Megatron-LM's modes, by (rows, columns): outputs and inputs of the matmul.
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),  # with a factor of 0.2: Liu et al., Moonlight
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),  # Jordan et al.
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}


def newton_schulz(matrices: Tensor, num_steps: int) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of `matrices` [count, rows, columns]."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    norm = torch.linalg.matrix_norm(matrices, keepdim=True)
    return _iterate(matrices, norm, is_tall, num_steps, lambda gram: gram)


def newton_schulz_slabs(slabs: Tensor, whole: Shape, num_steps: int, total: Total) -> Tensor:
    """Return the slabs [count, rows, columns] of nearly orthogonal matrices of shape `whole`.

    Args:
        total: returns the sum of a tensor over the homes of the other slabs.
    """
    norm = total(slabs.square().sum((-2, -1), keepdim=True)).sqrt()
    return _iterate(slabs, norm, whole[0] > whole[1], num_steps, total)


def _iterate(matrices: Tensor, norm: Tensor, is_tall: bool, num_steps: int, total: Total) -> Tensor:
    x = matrices.mT if is_tall else matrices
    x = x / norm.clamp(min=_LEAST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(num_steps):
        gram = total(x @ x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scale_of(shape: Sequence[int], config: OptimizerConfig) -> float:
    """Return the factor of the direction of a matrix."""
    return config.muon_extra_scale_factor * SCALES[config.muon_scale_mode](*shape)


def update_with_muon(exchange: MatrixExchange) -> Update:
    """Return the update of the matrices that `exchange` moves; their rounds follow one another, overlapped."""

    @torch.no_grad()
    def update(group: ParamGroup, config: OptimizerConfig, lr: float, num_steps: Tensor, skipped: Tensor) -> None:
        is_skipped = skipped != 0
        rate = (1 - skipped.double()) * lr
        decay = 1 - rate * group.weight_decay
        (momenta,) = group.states

        def sources(round_: Round) -> dict[int, Tensor]:
            made = {}
            for run in round_.shards:
                g, m = group.grads[run], momenta[run]
                new = torch.lerp(g, m, config.muon_momentum)
                torch.where(is_skipped, m, new, out=m)
                made[run] = torch.lerp(g, new, config.muon_momentum, out=new) if config.muon_use_nesterov else new
            return made

        def compute(matrices: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            return newton_schulz(matrices, config.muon_num_ns_steps).mul_(scale_of(matrices.shape[1:], config))

        def compute_slabs(slabs: Tensor, whole: Shape, total: Total) -> Tensor:
            return newton_schulz_slabs(slabs, whole, config.muon_num_ns_steps, total).mul_(scale_of(whole, config))

        for run, direction in exchange.map(sources, compute, compute_slabs):
            direction.masked_fill_(is_skipped, 0.0)  # it may not be finite
            group.mains[run].mul_(decay).sub_(direction.mul_(rate))

    return update
