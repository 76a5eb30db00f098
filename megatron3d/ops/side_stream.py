"""Copies next to the computation: a side stream of a device, and page-locked host memory that it copies to and from.

    compute     | layer 0 | layer 1       | layer 2       |
    side        .         | copy layer 0  | copy layer 1  | ...

On a CPU there is one stream: a copy is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

# Threads that touch the pages of new memory before it is page-locked, which one core does with 1 to 2 GB/s.
NUM_TOUCHING_THREADS = 4
_REGISTER_FOR_ALL_CONTEXTS = 1


class SideWork(Protocol):
    """Work on a side stream."""

    def hold_compute(self) -> None:
        """Let everything that is computed from now on wait for this work; the host does not wait."""
        ...

    def wait(self) -> None:
        """Wait on the host until this work is complete."""
        ...


class SideStream(Protocol):
    """Order of work next to the compute stream; pieces of work run one after another."""

    def run(self, work: Callable[[], None]) -> SideWork:
        """Start `work`, which only enqueues operations, after everything that is computed so far."""
        ...


class Completed:
    """Work that is complete."""

    def hold_compute(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class HostStream:
    """Runs work at once: the side stream of a CPU."""

    def run(self, work: Callable[[], None]) -> SideWork:
        work()
        return Completed()


class DeviceStream:
    """Side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device)

    def run(self, work: Callable[[], None]) -> SideWork:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
        return _DeviceWork(self._device, self._stream.record_event())


class _DeviceWork:
    def __init__(self, device: torch.device, end: torch.Event) -> None:
        self._device, self._end = device, end

    def hold_compute(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        self._end.synchronize()


def side_stream(device: torch.device) -> SideStream:
    """Return a new side stream of a device."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory [numel] for copies to and from `device`, page-locked if that is an accelerator.

    Nothing is added to its size, whereas torch rounds its pinned memory up to a power of two.  It stays page-locked
    until the process ends, so the caller keeps it.  Raises RuntimeError where the system does not allow as much.
    """
    memory = torch.empty(numel, dtype=dtype)
    if device.type != "cpu" and numel:
        with ThreadPoolExecutor(NUM_TOUCHING_THREADS) as threads:
            list(threads.map(Tensor.zero_, memory.chunk(NUM_TOUCHING_THREADS)))
        _page_lock(memory, device)
    return memory


def _page_lock(memory: Tensor, device: torch.device) -> None:
    torch.accelerator.set_device_index(device)  # each thread has its own, and the first device by default
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_FOR_ALL_CONTEXTS))
    if code:
        raise RuntimeError(f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {code})")
