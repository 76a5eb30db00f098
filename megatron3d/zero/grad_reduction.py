"""A flat's gradients on their way: scattered over the axes that share them out, then summed over the others."""

from __future__ import annotations

import torch

from megatron3d.comm.interface import Comm
from megatron3d.zero.flat_buffer import Flat


class Reduction:
    """Begins when it is made."""

    def __init__(self, flat: Flat, comm: Comm, dtype: torch.dtype | None) -> None:
        self._flat, self._comm = flat, comm
        axes, reduced = flat.sharding.axes, flat.kind.reduce_axes
        self._rest = tuple(axis for axis in reduced if axis not in axes) if axes else ()
        sent = flat.give_grad().to(dtype or flat.main_dtype)
        self._pending = comm.reduce_scatter(sent, axes, dim=0) if axes else comm.all_reduce(sent, reduced)

    def advance(self) -> bool:
        """Wait for what is under way; begin to sum my part over its holders, or keep the sum and return True."""
        total, rest = self._pending.wait(), self._rest
        if rest:
            self._pending, self._rest = self._comm.all_reduce(total, rest), ()
        else:
            self._flat.take_sum(total)
        return not rest
