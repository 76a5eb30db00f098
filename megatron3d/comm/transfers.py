"""A send to one rank and a receive from another, posted together, so that rings of them cannot deadlock."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class Works:
    """Works of one transfer: its send and its receive (gloo), or one work of both (NCCL)."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether all of them are done."""
        return all(work.is_completed() for work in self._works)


def send_and_receive(x: Tensor, to: int, out: Tensor, source: int, group: dist.ProcessGroup | None) -> Works:
    """Start to send `x` to rank `to` and to receive `out` from rank `source`; both are global ranks of the group."""
    send, receive = dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)
    return Works(dist.batch_isend_irecv([send, receive]))
