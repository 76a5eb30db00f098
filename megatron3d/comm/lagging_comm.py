"""`Comm` through host memory that reads and writes as late as NCCL may: a missing wait gives wrong numbers.

    compute stream    start | later kernels ...................... | wait: reads the result
    side stream             | sleeps | reads the input, poisons the output

NCCL reads an input at any time between the start of a collective and its wait, and so does this, on a stream of its
own; on a CPU a thread stands for the stream.  What a collective writes holds NaN from then until the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron3d.comm.host_comm import HostComm, Start, host_copy
from megatron3d.comm.interface import Comm, Pending

T = TypeVar("T")
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

    def _in_thread(self, call: Callable[[], T]) -> T:
        """Make a call after all that were started before."""
        return self._calls.submit(call).result()

    def barrier(self) -> None:
        self._in_thread(self._comm.barrier)

    def gather_object(self, value: Any) -> list[Any] | None:
        return self._in_thread(lambda: self._comm.gather_object(value))

    def broadcast_object(self, value: Any) -> Any:
        return self._in_thread(lambda: self._comm.broadcast_object(value))


def _read_and_poison(x: Tensor, written: Sequence[Tensor]) -> Tensor:
    host = host_copy(x)
    for part in written:
        part.detach().fill_(torch.nan if part.is_floating_point() else -1)
    return host
