"""Interface of the communicator: collectives over named mesh axes, and their pending results.

Every tensor collective returns a `Pending`, so that computation can run until `wait`.  Axes of size 1 communicate
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

from torch import Tensor
from typing_extensions import TypeVar  # with defaults, which typing has from Python 3.13 on

from megatron3d.parallel.mesh import Axes, Link, Mesh

# Writes a b^T into the first tensor [M, N], of a [M, K] and b [N, K].
PutProduct = Callable[[Tensor, Tensor, Tensor], None]
# Rows that go to each rank, or come from it.
Counts = Sequence[int]
T = TypeVar("T", default=Tensor)


class Pending(Generic[T]):
    """Result of an asynchronous collective, a tensor; after `wait` it no longer keeps the tensors alive."""

    def __init__(self, finish: Callable[[], T], is_done: Callable[[], bool] | None = None) -> None:
        self._finish: Callable[[], T] | None = finish
        self._is_done = is_done

    def is_done(self) -> bool:
        """Return whether `wait` would return at once; True where that is not known."""
        return self._is_done is None or self._is_done()

    def wait(self) -> T:
        """Wait for the result and return it; to be called once."""
        finish = self._finish
        assert finish is not None, "a collective is waited for twice"
        self._finish = self._is_done = None
        return finish()


def completed(x: T) -> Pending[T]:
    """Return a `Pending` for a result that needs no communication."""
    return Pending(lambda: x)


class GatheredProduct(NamedTuple):
    """Rows of all ranks [ranks * M, K], and their product [ranks * M, N]."""

    rows: Tensor
    product: Tensor


class ObjectCollectives(Protocol):
    """Collectives of small Python values over all ranks of a mesh."""

    @property
    def mesh(self) -> Mesh:
        """Return the mesh, with this rank's coordinates."""

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return every rank's value, in rank order, on rank 0; None elsewhere.

        Values are what `objects.encode` takes; tuples may arrive as lists.
        """

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank; elsewhere its tuples may be lists."""


class Comm(ObjectCollectives, Protocol):
    """Collectives over the axes of a mesh, and transfers over point-to-point links."""

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        """Return all ranks' shards `x`, of equal shape, concatenated along `dim`, the first of `axes` slowest."""

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        """All-gather `whole` [ranks * n] in place; this rank's shard is in its place already."""

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        """Return this rank's shard along `dim` [..., n / ranks, ...] of the sum over `axes` of `x` [..., n, ...]."""

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        """Return `x` of any shape reduced over `axes` (`op`: sum or max), in place if it is contiguous."""

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        """Send block i of `x` [ranks, ...] to the i-th rank of `axes`; return the blocks received, in this order."""

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        """Send the next `sent[i]` rows of `x` to the i-th rank of `axes`, in mesh order; return the rows received.

        They are in the order of the ranks, `received[i]` of the i-th one; the tensors differ in their rows alone.
        """

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        """Send `blocks[i]`, bytes in host memory of any number, to rank i; return what each rank sends to this one.

        Args:
            memory: bytes that receive it, where they are enough; else, and with None, new memory does.
        """

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        """Send `x` to the rank `by` places further along `axes`, around its end to the first; return `out`.

        `out`, contiguous and of the shape of `x`, receives what the rank `by` places before has sent.
        """

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        """Return all ranks' rows `a`, in the order of `all_gather`, and their product with b^T.

        Each rank's rows are multiplied when they have arrived, while others are on their way; `put` is the GEMM of
        this rank's device.
        """

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        """Return this rank's part along `dim` of the sum over `axes` of a b^T.

        The parts of other ranks are sent as soon as they are computed, while the next is computed.  Each rank adds in
        the order of the ranks, so that the result repeats bit for bit.
        """

    def send(self, x: Tensor, link: Link) -> Pending:
        """Send `x` of any shape to the other end of a link; `wait` returns it once its memory may change."""

    def receive(self, out: Tensor, link: Link) -> Pending:
        """Receive into `out`, contiguous and of the sent shape; the n-th receive of a link matches its n-th send."""

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        """Sum `x`, of the same shape on both ends of a link, in place."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class ForwardingComm:
    """Base of communicators on top of another one, `comm`, whose mesh and collectives of objects they have."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the other communicator."""
        return self.comm.mesh

    def barrier(self) -> None:
        self.comm.barrier()

    def gather_object(self, value: Any) -> list[Any] | None:
        return self.comm.gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        return self.comm.broadcast_object(value)

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        return self.comm.all_to_all_bytes(blocks, memory)
