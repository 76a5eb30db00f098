"""Exchange of positions for heads between context ranks (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509).

    [B, N, L, D]  of this rank's positions  ->  [B, N / c, S, D]  of all positions, in their order

Tensors to exchange are blocks [c, B, N / c, L, D], one for each rank's heads.
Letters: B sequences, N heads, L positions of a rank, S positions of all c ranks, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.position_order import PositionOrder
from megatron3d.parallel.mesh import Axes


class HeadExchange:
    """Exchange over `axes`.  Each method starts an exchange, and returns a function that waits for its result.

    Args:
        order: of the positions of all ranks over `axes`.
    """

    def __init__(self, order: PositionOrder, axes: Axes, comm: Comm) -> None:
        self._order, self._axes, self._comm = order, axes, comm
        self.num_ranks = comm.mesh.size(axes)

    @property
    def rank(self) -> int:
        """Index of this rank, whose share of the heads has the same index."""
        return self._comm.mesh.index(self._axes)

    def whole_positions(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Exchange blocks of several tensors at once for this rank's heads at all positions, [B, N / c, S, D] each."""
        sizes = [each.shape[2] for each in tensors]
        pending = self._comm.all_to_all(torch.cat(tensors, dim=2), self._axes)
        return lambda: [self._order.gathered(each) for each in pending.wait().split(sizes, dim=2)]

    def own_positions(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Exchange [B, N / c, S, D] of several tensors at once for all heads at this rank's positions, in blocks."""
        sizes = [each.shape[1] for each in tensors]
        pending = self._comm.all_to_all(self._order.scattered(torch.cat(tensors, dim=1)), self._axes)
        return lambda: list(pending.wait().split(sizes, dim=2))
