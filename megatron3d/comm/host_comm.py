"""`Comm` that moves tensors through host memory: for ranks that share a GPU, which NCCL refuses.

    GPU tensor -> copy in host memory -> collective of another `Comm`, over gloo -> GPU tensor

It is slow and overlaps nothing; its numbers are those of the other `Comm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, Counts, GatheredProduct, Pending, PutProduct, completed
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.p2p import Link

# Starts a collective on a tensor in host memory.
Start = Callable[[Tensor], Pending]


class HostComm:
    """Collectives of `comm` on copies in host memory; only `wait` writes to the tensors of the caller."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def mesh(self) -> Mesh:
        """Mesh of the other communicator."""
        return self._comm.mesh

    def _start(self, x: Tensor, start: Start, written: Sequence[Tensor] = ()) -> Callable[[], Tensor]:
        """Start a collective on a host copy of `x` and return what waits for it; its result replaces `written`."""
        return start(host_copy(x)).wait

    def _moved(self, x: Tensor, axes: Axes, start: Start) -> Pending:
        """Run a collective whose result is a tensor of its own."""
        if self.mesh.size(axes) == 1:
            return completed(x)
        wait = self._start(x, start)
        return Pending(lambda: wait().to(x.device))

    def _in_place(self, x: Tensor, start: Start, written: Sequence[Tensor] = ()) -> Pending:
        """Run a collective whose result replaces `x`, or only its parts `written` where these are given."""
        wait = self._start(x, start, written or [x])
        return Pending(lambda: _replace(x, wait()))

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._moved(x, axes, lambda host: self._comm.all_gather(host, axes, dim))

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(whole)
        parts = list(whole.chunk(self.mesh.size(axes)))
        parts.pop(self.mesh.index(axes))
        return self._in_place(whole, lambda host: self._comm.all_gather_into(host, axes), parts)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._moved(x, axes, lambda host: self._comm.reduce_scatter(host, axes, dim))

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        return self._in_place(x.contiguous(), lambda host: self._comm.all_reduce(host, axes, op))

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        return self._moved(x, axes, lambda host: self._comm.all_to_all(host, axes))

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        return self._moved(x, axes, lambda host: self._comm.all_to_all_rows(host, sent, received, axes))

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        wait = self._start(x, lambda host: self._comm.shift(host, torch.empty_like(host), axes, by), [out])
        return Pending(lambda: _replace(out, wait()))

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

    def send(self, x: Tensor, link: Link) -> Pending:
        wait = self._start(x, lambda host: self._comm.send(host, link))
        return Pending(lambda: (wait(), x)[1], lambda: False)

    def receive(self, out: Tensor, link: Link) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        return self._in_place(out, lambda host: self._comm.receive(host, link))

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        return self._in_place(x, lambda host: self._comm.all_reduce_pair(host, link))

    def barrier(self) -> None:
        self._comm.barrier()

    def gather_object(self, value: Any) -> list[Any] | None:
        return self._comm.gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._comm.broadcast_object(value)


def host_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy in host memory."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def _replace(x: Tensor, values: Tensor) -> Tensor:
    return x.copy_(values)
