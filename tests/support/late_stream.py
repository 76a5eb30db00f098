"""A side stream that reads its inputs and writes its outputs as late as an accelerator's may."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from megatron3d.ops.recompute import SideStream, SideWork


class LateStream(SideStream):
    """Runs work, in order, only when the compute stream waits for it: a missing wait reads or leaves wrong values.

    A thread that waits on the host waits until then, or for `patience_s`, after which the work runs as well.
    """

    def __init__(self, patience_s: float = 1.0) -> None:
        self.queue: list[_Late] = []
        self.patience_s = patience_s

    def run(self, work: Callable[[], None]) -> SideWork:
        self.queue.append(_Late(self, work))
        return self.queue[-1]


class _Late(SideWork):
    def __init__(self, stream: LateStream, work: Callable[[], None]) -> None:
        self._stream, self._work, self._done = stream, work, Event()

    def hold_compute(self) -> None:
        while not self._done.is_set():
            first = self._stream.queue.pop(0)
            first._work()
            first._done.set()

    def wait(self) -> None:
        if not self._done.wait(self._stream.patience_s):
            self.hold_compute()
