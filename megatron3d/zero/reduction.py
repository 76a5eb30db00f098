"""A flat's gradients on their way: scattered over the axes that share them out, then summed over the others."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron3d.comm import Comm, Pending
from megatron3d.zero.flat import Flat


class Reduction:
    """Begins when it is made; `go_on` begins the second sum where the first is over, `finish` waits for everything."""

    def __init__(self, flat: Flat, comm: Comm, dtype: torch.dtype | None) -> None:
        assert flat.whole_grad is not None, "there is nothing to reduce"
        self.flat, self._comm, self.is_done = flat, comm, False
        axes = flat.sharding.axes
        self._rest = tuple(axis for axis in flat.kind.reduce_axes if axis not in axes)
        sent = flat.whole_grad.to(dtype or flat.main_dtype)
        if flat.sharding.grads:
            flat.whole_grad = None  # the next microbatch's gradients get another
        self._first: Pending | None = comm.reduce_scatter(sent, axes, dim=0) if axes else None
        self._second: Pending | None = None if axes else comm.all_reduce(sent, self._rest)

    def go_on(self) -> None:
        """Begin to sum my part over the axes that hold copies of it."""
        if self._first is not None:
            part, self._first = self._first.wait(), None
            self._second = self._comm.all_reduce(part, self._rest)

    def finish(self) -> None:
        """Put the sum where the optimizer finds it."""
        if self.is_done:
            return
        self.go_on()
        assert self._second is not None, "a sum was never begun"
        self._put(self._second.wait())
        self.is_done = True

    def _put(self, total: Tensor) -> None:
        flat = self.flat
        if not flat.sharding.grads or flat.num_reduced == 0:
            if total.data_ptr() != flat.grad.data_ptr():
                flat.grad.copy_(total)
        else:
            flat.grad.add_(total)
        flat.num_reduced += 1
