"""The only door to torch.distributed: collectives by axis name.

Every tensor collective returns a `Pending`; calling `wait` gives the result, so that work can be put between.  Along an
axis of size 1 nothing happens.  Sizes are checked here, since not every back end notices wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.p2p import Link, matchings

# torch 2.13 renamed these two and warns under the old names, which are the only ones that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


_NOTHING: tuple[str, tuple[str, ...]] = ("", ())


class Pending:
    """Result of an asynchronous collective; after `wait` it no longer keeps the tensors alive."""

    def __init__(self, finish: Callable[[], Tensor], is_done: Callable[[], bool] | None = None) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._is_done = is_done

    def is_done(self) -> bool:
        """Return whether `wait` would return at once; True where that is not known."""
        return self._is_done is None or self._is_done()

    def wait(self) -> Tensor:
        """Wait for the result and return it; to be called once."""
        finish = self._finish
        assert finish is not None, "a collective is waited for twice"
        self._finish = self._is_done = None
        return finish()


def ready(x: Tensor) -> Pending:
    """A `Pending` for something that needed no communication."""
    return Pending(lambda: x)


# Makes the context in which a rank waits for a collective over these axes.
WaitHook = Callable[[Axes], AbstractContextManager[None]]


def _no_hook(axes: Axes) -> AbstractContextManager[None]:
    return nullcontext()


class Objects(Protocol):
    """Small Python values over a mesh."""

    @property
    def mesh(self) -> Mesh:
        """The ranks, seen from this one."""
        ...

    def gather_object(self, value: Any) -> list[Any] | None:
        """Every rank's small Python value, in rank order, on rank 0; None elsewhere."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's small Python value on every rank."""
        ...


class Comm(Objects, Protocol):
    """Collectives over a mesh."""

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        """The pieces of all ranks along `axes`, joined along `dim`, the first axis slowest."""
        ...

    def fill(self, whole: Tensor, axes: Axes) -> Pending:
        """`whole` [ranks * n] with every rank's piece in its place, in place; mine is there already."""
        ...

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        """My piece along `dim` of the sum over `axes`."""
        ...

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        """`x` reduced over `axes`, in place where it is contiguous."""
        ...

    def send(self, x: Tensor, link: Link) -> Pending:
        """`x` to the other end of a link; `wait` gives it back when its memory may change."""
        ...

    def receive(self, out: Tensor, link: Link) -> Pending:
        """What the other end of a link sends, into `out`; the n-th thing received is the n-th sent."""
        ...

    def add(self, x: Tensor, link: Link) -> Pending:
        """The sum of both ends' `x`, in place."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...


class ObjectComm:
    """Small Python values over all ranks, by the group of the world or another group of everyone."""

    def __init__(self, mesh: Mesh, everyone: dist.ProcessGroup | None = None) -> None:
        self.mesh, self._everyone = mesh, everyone

    def gather_object(self, value: Any) -> list[Any] | None:
        if self.mesh.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.mesh.world_size if self.mesh.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._everyone)
        return values

    def broadcast_object(self, value: Any) -> Any:
        if self.mesh.world_size == 1:
            return value
        values = [value]
        device = torch.device("cpu") if dist.get_backend(self._everyone) == "gloo" else None
        dist.broadcast_object_list(values, src=0, group=self._everyone, device=device)
        return values[0]


def aside(mesh: Mesh, timeout_s: float = 3600.0) -> ObjectComm:
    """All ranks over connections of their own, through host memory, for a thread beside the one that trains.

    Every rank calls this at the same place; a value that one waits for longer than `timeout_s` raises RuntimeError.
    """
    if mesh.world_size == 1:
        return ObjectComm(mesh)
    ranks, timeout = list(range(mesh.world_size)), timedelta(seconds=timeout_s)
    group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True, group_desc="aside")
    return ObjectComm(mesh, group)


class ProcessComm(ObjectComm):
    """Collectives of one process among `mesh.world_size`, over groups made once in the order of `axis_sets`, and
    then of `links`, all along one axis.

    Each rank creates its own group of each set only, so that thousands of ranks start as fast as eight.  torch numbers
    the ranks of a group in the order of the world; where axes are asked for in another order, pieces are reordered.

    Attributes:
        begun: how many tensors have been sent on their way.
        last_begun: what was begun last, and over which axes.
    """

    def __init__(self, mesh: Mesh, axis_sets: Iterable[Axes], links: Iterable[Link] = ()) -> None:
        super().__init__(mesh)
        self.begun, self.last_begun = 0, _NOTHING
        self._wait_hook: WaitHook = _no_hook
        self._groups: dict[Axes, dist.ProcessGroup | None] = {}
        self._orders: dict[Axes, list[int] | None] = {}
        self._lives: dict[Axes, Axes] = {}
        for axes in dict.fromkeys(mesh.nontrivial(mesh.in_order(axes)) for axes in axis_sets):
            if axes:
                self._groups[axes] = self._make_group(axes)
        self._links: dict[Link, dist.ProcessGroup] = {}
        for matching in matchings(links):
            self._make_link(next((link for link in matching if self.mesh.coord(link.axis) in link.ends), None))

    def _make_link(self, link: Link | None) -> None:
        """A communicator for two, so that transfers queue behind nothing but transfers between the same two.

        torch names a group after the number of groups that its ranks have made before, so that who has no link in a
        round makes one alone.
        """
        ranks = [self.mesh.rank] if link is None else list(link.ranks(self.mesh))
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=str(link))
        if link is not None:
            self._links[link] = group

    def _far_end(self, link: Link, what: str) -> tuple[dist.ProcessGroup, int]:
        assert link in self._links, f"no group was made for {link}; there are {list(self._links)}"
        (other,) = {*link.ranks(self.mesh)} - {self.mesh.rank}
        self.begun, self.last_begun = self.begun + 1, (what, (f"{link.axis} {link.low}-{link.high}",))
        return self._links[link], other

    def _make_group(self, axes: Axes) -> dist.ProcessGroup | None:
        ranks = self.mesh.ranks(axes)
        if ranks == tuple(range(self.mesh.world_size)):
            return None
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="x".join(axes)
        )
        return group

    def set_wait_hook(self, hook: WaitHook | None) -> None:
        """Enter `hook(axes)` while this rank waits for a collective over these axes; None: nothing."""
        self._wait_hook = hook or _no_hook

    @property
    def axis_sets(self) -> tuple[Axes, ...]:
        """Everything that is communicated over, in one order on all ranks."""
        return tuple(self._groups)

    def _pending(
        self, work: dist.Work | None, x: Tensor, axes: Axes, result: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Pending:
        """What `result` makes of `x` when `work` is done."""
        assert work is not None, "this rank is outside of its own group"

        def finish() -> Tensor:
            with self._wait_hook(self._live(axes)):
                work.wait()
            return result(x)

        return Pending(finish, work.is_completed)

    def _group(self, axes: Axes, what: str) -> tuple[dist.ProcessGroup | None, int]:
        live = self._live(axes)
        assert not live or live in self._groups, f"no group was made for {live}; there are {list(self._groups)}"
        if live:
            self.begun, self.last_begun = self.begun + 1, (what, live)
        return self._groups.get(live), self.mesh.size(live)

    def _live(self, axes: Axes) -> Axes:
        """Those of more than one rank, in the mesh's order."""
        if axes not in self._lives:
            self._lives[axes] = self.mesh.nontrivial(self.mesh.in_order(axes))
        return self._lives[axes]

    def _order(self, axes: Axes) -> list[int] | None:
        """Where the pieces of `axes` stand in the group's order; None where that is the same."""
        if axes not in self._orders:
            place = {rank: index for index, rank in enumerate(sorted(self.mesh.ranks(axes)))}
            order = [place[rank] for rank in self.mesh.ranks(axes)]
            self._orders[axes] = None if order == sorted(order) else order
        return self._orders[axes]

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        group, ranks = self._group(axes, "all_gather")
        if ranks == 1:
            return ready(x)
        x = x.contiguous()
        out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        work = _all_gather(out, x, group=group, async_op=True)
        order = self._order(axes)

        def joined(out: Tensor) -> Tensor:
            if dim == 0 and order is None:
                return out
            pieces: Tensor = out.unflatten(0, (ranks, -1))
            pieces = pieces if order is None else pieces[order]
            return pieces.movedim(0, dim).flatten(dim, dim + 1)

        return self._pending(work, out, axes, joined)

    def fill(self, whole: Tensor, axes: Axes) -> Pending:
        group, ranks = self._group(axes, "fill")
        if ranks == 1:
            return ready(whole)
        assert whole.shape[0] % ranks == 0, f"{tuple(whole.shape)} does not divide by {axes}={ranks} ranks"
        assert self._order(axes) is None, f"{axes} are not in the mesh's order"
        mine = whole.chunk(ranks)[self.mesh.index(axes)]
        return self._pending(_all_gather(whole, mine, group=group, async_op=True), whole, axes)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        group, ranks = self._group(axes, "reduce_scatter")
        if ranks == 1:
            return ready(x)
        assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} along {dim} does not divide by {axes}={ranks} ranks"
        order = self._order(axes)
        if dim != 0 or order is not None:
            pieces = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
            pieces = pieces if order is None else pieces[[order.index(place) for place in range(ranks)]]
            x = pieces.flatten(0, 1)
        x = x.contiguous()
        if dist.get_backend(group) == "gloo":  # whose own is an all-reduce, with twice the bytes and rounds
            pieces = torch.empty_like(x)
            work = dist.all_to_all_single(pieces, x, group=group, async_op=True)
            return self._pending(work, pieces, axes, lambda pieces: pieces.unflatten(0, (ranks, -1)).sum(0))
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        return self._pending(_reduce_scatter(out, x, group=group, async_op=True), out, axes)

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        group, ranks = self._group(axes, "all_reduce")
        if ranks == 1:
            return ready(x)
        x = x.contiguous()
        return self._pending(dist.all_reduce(x, _OPS[op], group=group, async_op=True), x, axes)

    def send(self, x: Tensor, link: Link) -> Pending:
        group, other = self._far_end(link, "send")
        x = x.contiguous()
        return self._pending(dist.isend(x, other, group=group), x, (link.axis,))

    def receive(self, out: Tensor, link: Link) -> Pending:
        group, other = self._far_end(link, "receive")
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        return self._pending(dist.irecv(out, other, group=group), out, (link.axis,))

    def add(self, x: Tensor, link: Link) -> Pending:
        group, _ = self._far_end(link, "add")
        return self._pending(dist.all_reduce(x, group=group, async_op=True), x, (link.axis,))

    def barrier(self) -> None:
        if self.mesh.world_size > 1:
            dist.barrier()
