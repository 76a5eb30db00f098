"""Communicator that forwards every call to another one and records its bytes, to compare with closed forms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron3d.comm.interface import Comm, Counts, ForwardingComm, GatheredProduct, Pending, PutProduct
from megatron3d.parallel.matmul_plan import Traffic, ring
from megatron3d.parallel.mesh import Axes, Link


class RecordedCall(NamedTuple):
    """Recorded operation of a rank, its axes or link, and the shape and dtype of its tensor."""

    what: str
    where: Axes | Link
    shape: tuple[int, ...]
    dtype: str


class Recorder(ForwardingComm):
    """Wraps a `Comm` and records its operations.

    Attributes:
        calls: collectives and sends, each with the bytes that this rank sends (in a collective, over a ring).
        entries: all operations with the arguments that must agree on all ranks of a group.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.calls: list[Traffic] = []
        self.entries: list[RecordedCall] = []

    def _record(self, collective: str, axes: Axes, x: Tensor, whole_bytes: float) -> None:
        if live := self.mesh.nontrivial(axes):
            self.calls.append(ring(collective, live, whole_bytes, self.mesh))
            self._note(collective, self.mesh.in_order(live), x)

    def _note(self, what: str, where: Axes | Link, x: Tensor) -> None:
        self.entries.append(RecordedCall(what, where, tuple(x.shape), str(x.dtype).removeprefix("torch.")))

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        self._record("all_gather", axes, x, x.nbytes * self.mesh.size(axes))
        return self.comm.all_gather(x, axes, dim)

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        self._record("all_gather", axes, whole, whole.nbytes)
        return self.comm.all_gather_into(whole, axes)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        self._record("reduce_scatter", axes, x, x.nbytes)
        return self.comm.reduce_scatter(x, axes, dim)

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        self._record("all_reduce", axes, x, x.nbytes)
        return self.comm.all_reduce(x, axes, op)

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        self._record("all_to_all", axes, x, x.nbytes)
        return self.comm.all_to_all(x, axes)

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        live = self.mesh.nontrivial(axes)
        if live:
            others = sum(sent) - sent[self.mesh.index(live)]
            self.calls.append(Traffic("all_to_all", live, others * x[:1].numel() * x.itemsize))
            self._note("all_to_all of rows", self.mesh.in_order(live), x.new_empty((0, *x.shape[1:])))
        return self.comm.all_to_all_rows(x, sent, received, axes)

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        live = self.mesh.nontrivial(axes)
        if live:
            self.calls.append(Traffic("shift", live, x.nbytes))
            self._note(f"shift by {by}", self.mesh.in_order(live), x)
        return self.comm.shift(x, out, axes, by)

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        self._record("all_gather_matmul", axes, a_MK, a_MK.nbytes * self.mesh.size(axes))
        return self.comm.all_gather_matmul(a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        self._record("matmul_reduce_scatter", axes, a_MK, len(a_MK) * len(b_NK) * a_MK.itemsize)
        return self.comm.matmul_reduce_scatter(a_MK, b_NK, axes, dim, put)

    def send(self, x: Tensor, link: Link) -> Pending:
        self.calls.append(Traffic("send", (link.axis,), x.nbytes))
        self._note("send", link, x)
        return self.comm.send(x, link)

    def receive(self, out: Tensor, link: Link) -> Pending:
        self._note("receive", link, out)
        return self.comm.receive(out, link)

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        self.calls.append(Traffic("add", (link.axis,), x.nbytes))
        self._note("add", link, x)
        return self.comm.all_reduce_pair(x, link)
