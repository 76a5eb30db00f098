"""Copy of a rank's state in host memory, from which a checkpoint is written while training continues.

    training   | step 4   | step 5: forward, backward   | update | ...
    side                  | copy of the state after 4   |                the update waits for the copy
    thread                                              | write, fsync, publish

One flat buffer per dtype, of the size that is needed, is made when the run starts and used by every save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megatron3d.checkpoint.piece import Piece
from megatron3d.errors import UserError
from megatron3d.ops.side_stream import Completed, SideStream, SideWork, host_memory, side_stream

# Returns the pieces that a rank writes, after passing each of their tensors through a function (such as a copy).
PieceSource = Callable[[Callable[[Tensor], Tensor]], Iterable[Piece]]
Buffers = dict[torch.dtype, Tensor]


class Snapshot:
    """Host memory for one copy of the state of a rank, overwritten by the next one.

    Args:
        device: the device of the tensors.
        stream: the stream that copies; None: a new side stream of the device.
    """

    def __init__(self, device: torch.device, stream: SideStream | None = None) -> None:
        self._device, self._stream = device, stream or side_stream(device)
        self._making: Future[Buffers] | None = None
        self._copying: SideWork = Completed()

    def allocate(self, source: PieceSource) -> None:
        """Start to make the memory for what `source` yields, in a thread, since page-locking takes seconds."""
        sizes = Counter[torch.dtype]()

        def measure(x: Tensor) -> Tensor:
            sizes[x.dtype] += x.numel()
            return x

        list(source(measure))
        thread = ThreadPoolExecutor(1, "snapshot")
        self._making = thread.submit(
            lambda: {dtype: host_memory(numel, dtype, self._device) for dtype, numel in sizes.items()}
        )
        thread.shutdown(wait=False)

    def take(self, source: PieceSource) -> list[Piece]:
        """Start to copy what `source` yields; return pieces whose tensors are complete after `wait`.

        Raises UserError where the memory cannot be page-locked.
        """
        buffers, used = self._made(source), Counter[torch.dtype]()
        copies: list[tuple[Tensor, Tensor]] = []

        def place(x: Tensor) -> Tensor:
            start = used[x.dtype]
            used[x.dtype] += x.numel()
            here = buffers[x.dtype][start : used[x.dtype]].view(x.shape)
            copies.append((here, x.detach()))
            return here

        def copy() -> None:
            for here, x in copies:
                here.copy_(x, non_blocking=True)

        pieces = list(source(place))
        assert used == {dtype: len(memory) for dtype, memory in buffers.items()}, "the state has another size"
        self._copying = self._stream.run(copy)
        return pieces

    def _made(self, source: PieceSource) -> Buffers:
        if self._making is None:
            self.allocate(source)
        assert self._making is not None, "allocate starts to make the memory"
        try:
            return self._making.result()
        except RuntimeError as error:
            raise UserError(f"checkpoint.async_save=true: {error}; use false, or fewer ranks per node") from error

    def hold_update(self) -> None:
        """Let the next update of the state wait for the copy; the host does not wait."""
        self._copying.hold_compute()

    def wait(self) -> None:
        """Wait until the copy is complete."""
        self._copying.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(memory.nbytes for memory in self._making.result().values()) if self._making else 0
