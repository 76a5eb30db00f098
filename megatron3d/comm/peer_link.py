"""Transfers in host memory between a rank and its peer, over connections that training does not use."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron3d.runtime.machine import CPU_BACKEND
from megatron3d.runtime.waits import wait_for_transfer


class PeerLink(Protocol):
    """Sends to one rank and receives from one, which may be another."""

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send contiguous tensors in host memory to the peer, receive from the rank whose peer this is, and wait.

        The n-th tensor that is received has the dtype and size of the n-th one that the other rank sends.
        """


class GlooPeerLink:
    """A `PeerLink` over a gloo group of its own, so that a thread may use it; all ranks must create it together.

    Args:
        peer: rank that this one sends to.
        source: rank that sends to this one.
        timeout: limit of a transfer; None: torch's default.
    """

    def __init__(self, peer: int, source: int, timeout: timedelta | None = None) -> None:
        self._peer, self._source = peer, source
        self._group = dist.new_group(backend=CPU_BACKEND, timeout=timeout, group_desc="in-memory checkpoints")

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        works = [dist.isend(each, self._peer, group=self._group) for each in sent if each.numel()]
        works += [dist.irecv(each, self._source, group=self._group) for each in received if each.numel()]
        for work in works:
            assert work is not None, "this rank is in the group"
            wait_for_transfer(work)
