"""A flat's gradients on their way: scattered over the axes that share them out, then summed over the others."""

from __future__ import annotations

import torch

from megatron3d.comm import Comm
from megatron3d.zero.flat import Flat


class Reduction:
    """Begins when it is made; `go_on` begins a second sum where there is one, `finish` waits for the last."""

    def __init__(self, flat: Flat, comm: Comm, dtype: torch.dtype | None) -> None:
        self._flat, self._comm = flat, comm
        axes, reduced = flat.sharding.axes, flat.kind.reduce_axes
        self._rest = tuple(axis for axis in reduced if axis not in axes) if axes else ()
        sent = flat.give_grad().to(dtype or flat.main_dtype)
        self._pending = comm.reduce_scatter(sent, axes, dim=0) if axes else comm.all_reduce(sent, reduced)

    def go_on(self) -> None:
        """Begin to sum my part over the axes that hold copies of it; waits for the first sum."""
        if self._rest:
            self._pending, self._rest = self._comm.all_reduce(self._pending.wait(), self._rest), ()

    def finish(self) -> None:
        """Put the sum where the optimizer finds it."""
        self.go_on()
        self._flat.take_sum(self._pending.wait())
