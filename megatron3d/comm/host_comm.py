"""`Comm` through host memory, for ranks that share a GPU, which NCCL refuses; and one that is as late as NCCL may be.

    GPU tensor -> copy in host memory -> collective of another `Comm`, over gloo -> GPU tensor

It is slow and overlaps nothing; its numbers are those of the other `Comm`.  `LaggingComm` makes a missing wait visible:

    compute stream    start | later kernels ...................... | wait: reads the result
    side stream             | sleeps | reads the input, poisons the output

NCCL reads an input at any time between the start of a collective and its wait, and so does this, on a stream of its
own; on a CPU a thread stands for the stream.  What a collective writes holds NaN from then until the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, Counts, ForwardingComm, GatheredProduct, Pending, PutProduct, completed
from megatron3d.parallel.mesh import Axes, Link

# Starts a collective on a tensor in host memory.
Start = Callable[[Tensor], Pending]


class HostComm(ForwardingComm):
    """Collectives of `comm` on copies in host memory; only `wait` writes to the tensors of the caller."""

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
        return self._moved(x, axes, lambda host: self.comm.all_gather(host, axes, dim))

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(whole)
        parts = list(whole.chunk(self.mesh.size(axes)))
        parts.pop(self.mesh.index(axes))
        return self._in_place(whole, lambda host: self.comm.all_gather_into(host, axes), parts)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        return self._moved(x, axes, lambda host: self.comm.reduce_scatter(host, axes, dim))

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        return self._in_place(x.contiguous(), lambda host: self.comm.all_reduce(host, axes, op))

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        return self._moved(x, axes, lambda host: self.comm.all_to_all(host, axes))

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        return self._moved(x, axes, lambda host: self.comm.all_to_all_rows(host, sent, received, axes))

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        wait = self._start(x, lambda host: self.comm.shift(host, torch.empty_like(host), axes, by), [out])
        return Pending(lambda: _replace(out, wait()))

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

    def send(self, x: Tensor, link: Link) -> Pending:
        wait = self._start(x, lambda host: self.comm.send(host, link))
        return Pending(lambda: (wait(), x)[1], lambda: False)

    def receive(self, out: Tensor, link: Link) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        return self._in_place(out, lambda host: self.comm.receive(host, link))

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        return self._in_place(x, lambda host: self.comm.all_reduce_pair(host, link))


def host_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy in host memory."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def _replace(x: Tensor, values: Tensor) -> Tensor:
    return x.copy_(values)


# Cycles of a GPU per second, nearly.
CYCLES_PER_S = 1.5e9


class LaggingComm(HostComm):
    """Collectives of `comm` on copies in host memory, `lag_s` seconds after their start.

    One thread makes all calls, in the order in which they were started, so that they match those of other ranks.
    """

    def __init__(self, comm: Comm, lag_s: float) -> None:
        super().__init__(comm)
        self._lag_s = lag_s
        self._calls = ThreadPoolExecutor(1, "lagging")
        self._side: dict[torch.device, torch.Stream] = {}

    def _start(self, x: Tensor, start: Start, written: Sequence[Tensor] = ()) -> Callable[[], Tensor]:
        stream = self._side_stream(x.device)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(x.device))
        pending: Future[Pending] = self._calls.submit(self._late, x.detach(), start, written, stream)

        def wait() -> Tensor:
            result = pending.result().wait()
            if stream is not None:
                torch.accelerator.current_stream(x.device).wait_stream(stream)
            return result

        return wait

    @torch.no_grad()
    def _late(self, x: Tensor, start: Start, written: Sequence[Tensor], stream: torch.Stream | None) -> Pending:
        """Read the input late, poison the output, and start the collective; runs in the thread."""
        if stream is None:
            time.sleep(self._lag_s)
            host = _read_and_poison(x, written)
        else:
            with stream:
                torch.cuda._sleep(int(self._lag_s * CYCLES_PER_S))
                host = _read_and_poison(x, written)
        return start(host)

    def _side_stream(self, device: torch.device) -> torch.Stream | None:
        if device.type == "cpu":
            return None
        if device not in self._side:
            self._side[device] = torch.Stream(device)
        return self._side[device]

    def barrier(self) -> None:
        self._calls.submit(self.comm.barrier).result()

    def gather_object(self, value: Any) -> list[Any] | None:
        return self._calls.submit(self.comm.gather_object, value).result()

    def broadcast_object(self, value: Any) -> Any:
        return self._calls.submit(self.comm.broadcast_object, value).result()

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        return self._calls.submit(self.comm.all_to_all_bytes, blocks, memory).result()


def _read_and_poison(x: Tensor, written: Sequence[Tensor]) -> Tensor:
    host = host_copy(x)
    for part in written:
        part.detach().fill_(torch.nan if part.is_floating_point() else -1)
    return host
