"""Reduction of one flat buffer's gradients: reduce-scatter over the sharding axes, then all-reduce over the others."""

from __future__ import annotations

import torch

from megatron3d.comm.interface import Comm
from megatron3d.zero.flat_buffer import FlatBuffer


class GradReduction:
    """Reduction in flight; the constructor starts it."""

    def __init__(self, flat: FlatBuffer, comm: Comm, dtype: torch.dtype | None) -> None:
        self._flat, self._comm = flat, comm
        axes, reduced = flat.sharding.axes, flat.sync.reduce_axes
        self._rest = comm.mesh.without(reduced, axes) if axes else ()
        sent = flat.take_grad().to(dtype or flat.main_dtype)
        self._pending = comm.reduce_scatter(sent, axes, dim=0) if axes else comm.all_reduce(sent, reduced)

    def advance(self) -> bool:
        """Wait for the collective in flight, then start the next; after the last one store the sum and return True."""
        total, rest = self._pending.wait(), self._rest
        if rest:
            self._pending, self._rest = self._comm.all_reduce(total, rest), ()
        else:
            self._flat.store_reduced(total)
        return not rest
