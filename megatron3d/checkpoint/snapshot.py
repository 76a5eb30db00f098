"""A copy of tensors in host memory, from which a thread writes while training changes the tensors themselves."""

from __future__ import annotations

import torch
from torch import Tensor


class Snapshot:
    """Memory that the next snapshot uses again: pinned where the tensors are on an accelerator."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._num_used = 0
        self._device: torch.device | None = None

    def begin(self) -> None:
        """What was copied so far may be overwritten."""
        self._num_used = 0

    def copy(self, x: Tensor) -> Tensor:
        """A copy, complete after `settle`."""
        is_on_host = x.device.type == "cpu"
        if self._num_used == len(self._held):
            self._held.append(x.new_empty(0))
        into = self._held[self._num_used]
        if (into.shape, into.dtype) != (x.shape, x.dtype) or into.device.type != "cpu":
            into = torch.empty(x.shape, dtype=x.dtype, pin_memory=not is_on_host)
            self._held[self._num_used] = into
        self._num_used += 1
        into.copy_(x.detach(), non_blocking=True)
        self._device = None if is_on_host else x.device
        return into

    def settle(self) -> None:
        """Wait until everything is copied."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return sum(tensor.nbytes for tensor in self._held)
