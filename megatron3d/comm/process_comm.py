"""`Comm` over torch.distributed, in process groups of mesh axes and of point-to-point links.

Only modules of this package and of the runtime import torch.distributed.  Sizes are checked here, since not every
backend does.  A collective over all ranks runs over parts of the mesh's axes, one after another: a group of all ranks
would be one communicator more, with its own memory on every GPU, for a few numbers per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, Counts, GatheredProduct, Pending, PutProduct, completed
from megatron3d.comm.objects import GroupObjects, store_objects
from megatron3d.comm.process_groups import CollectiveLog, ProcessGroups, current_device
from megatron3d.parallel.mesh import Axes, Link, Mesh, disjoint_cover
from megatron3d.runtime.machine import CPU_BACKEND, FAKE_BACKEND, GPU_BACKEND
from megatron3d.runtime.waits import LOSSES, wait_for_collective, wait_for_transfer


def _in_order(shards: Tensor, order: Sequence[int]) -> Tensor:
    """Return the shards in this order; an index would be copied to the device, which the host waits for."""
    return torch.stack([shards[place] for place in order])


def joined(x: Tensor, ranks: int, order: list[int] | None, dim: int) -> Tensor:
    """Return shards, one below the other in the group's order, concatenated along `dim` in the order of the axes."""
    if dim == 0 and order is None:
        return x
    shards: Tensor = x.unflatten(0, (ranks, -1))
    shards = shards if order is None else _in_order(shards, order)
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def below_one_another(x: Tensor, ranks: int, order: list[int] | None, dim: int) -> Tensor:
    """Return the shards of `x` along `dim`, contiguous and one below the other in the group's order."""
    if dim != 0 or order is not None:
        shards = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
        shards = shards if order is None else _in_order(shards, [order.index(place) for place in range(ranks)])
        x = shards.flatten(0, 1)
    return x.contiguous()


class Works:
    """Works of one transfer: its send, its receive, or both (gloo), or one work of both (NCCL)."""

    def __init__(self, works: Iterable[dist.Work | None], backend: str) -> None:
        self._works = [work for work in works if work is not None]  # a rank outside of the group has none
        self._wait = wait_for_transfer if backend == CPU_BACKEND else dist.Work.wait

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            self._wait(work)

    def is_completed(self) -> bool:
        """Return whether all of them are done."""
        return all(work.is_completed() for work in self._works)


def all_reduce_by_parts(comm: Comm, x: Tensor, parts: tuple[Axes, ...], op: str) -> Pending:
    """Return `x` reduced over all `parts`, in place if it is contiguous; only the first part starts at once."""
    first, *others = parts
    pending = comm.all_reduce(x, first, op)

    def finish() -> Tensor:
        total = pending.wait()
        for axes in others:
            total = comm.all_reduce(total, axes, op).wait()
        return total

    return Pending(finish)


def all_gather_by_parts(comm: Comm, x: Tensor, parts: tuple[Axes, ...]) -> Pending:
    """Return all ranks' shards `x` [n, ...], concatenated along dim 0 in rank order.

    The parts have every axis of the mesh that has more than one rank.  Only the first one starts at once.
    """
    first, *others = parts
    pending = comm.all_gather(x, first, 0)

    def finish() -> Tensor:
        whole = pending.wait()
        for axes in others:
            whole = comm.all_gather(whole, axes, 0).wait()
        slowest_first = [axis for axes in reversed(parts) for axis in axes]
        shards: Tensor = whole.unflatten(0, (*(comm.mesh.sizes[axis] for axis in slowest_first), len(x)))
        order = [slowest_first.index(axis) for axis in comm.mesh.in_order(slowest_first)]
        rest = range(len(order), shards.dim())
        return shards.permute(*order, *rest).flatten(0, len(order))

    return Pending(finish)


# torch 2.13 renamed these two and warns about the old names, the only ones in torch 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Returns the context manager in which a rank waits for a collective over these axes.
WaitHook = Callable[[Axes], AbstractContextManager[None]]


def _no_hook(axes: Axes) -> AbstractContextManager[None]:
    return nullcontext()


def _never() -> bool:
    """Say that a transfer without other ranks is in flight until the wait, as on a GPU, where the CPU runs ahead.

    torch's fake works say so themselves up to torch 2.14, and in torch 2.15 that they are completed.
    """
    return False


class ProcessComm:
    """Collectives of one process among `mesh.world_size`.

    torch sorts the ranks of a group; if a caller names axes in another order, the shards are reordered.

    A collective over all ranks runs over parts of the axes, one after another, unless a group of all ranks exists: one
    of `axis_sets`, or the one that gloo has made for the rendezvous.

    Args:
        timeout: limit for a collective of any group; None: torch's default, ten minutes with NCCL.
        has_world_group: a group of all ranks exists already; None: with every backend but NCCL, which connects the
            ranks of a group when it is first used.
        exposed: those of `axis_sets` whose collectives overlap with no computation.

    Attributes:
        log: the collectives and transfers started so far, per group.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_sets: Iterable[Axes],
        links: Iterable[Link] = (),
        timeout: timedelta | None = None,
        has_world_group: bool | None = None,
        exposed: Collection[Axes] = (),
    ) -> None:
        self.mesh = mesh
        is_connected = mesh.world_size == 1 or dist.is_initialized()  # a mesh without processes has no groups
        is_over_nccl = mesh.world_size > 1 and is_connected and dist.get_backend() == GPU_BACKEND
        self._backend = GPU_BACKEND if is_over_nccl else CPU_BACKEND
        self._is_fake = mesh.world_size > 1 and is_connected and dist.get_backend() == FAKE_BACKEND
        if has_world_group is None:
            has_world_group = is_connected and not is_over_nccl
        self._objects = store_objects(mesh, timeout) if is_over_nccl else GroupObjects(mesh)
        self._host_group: dist.ProcessGroup | None = None  # made by its first use, by all ranks together
        self.log = CollectiveLog(mesh)
        self._wait_hook: WaitHook = _no_hook
        axis_sets = [*([mesh.names] if has_world_group else []), *axis_sets]
        groups = ProcessGroups(mesh, axis_sets, links, timeout, exposed)
        self._groups, self._links = groups.of_axes, groups.of_links
        self._orders: dict[Axes, list[int] | None] = {}
        self._lives: dict[Axes, Axes] = {}
        self._shared: dict[Axes, bool] = {}
        for axes in self._groups:
            self.log.add(axes)
        for link in dict.fromkeys(link for link, _ in self._links):
            self.log.add_link(link)

    def warm_up(self, summed_links: Iterable[Link] = ()) -> list[tuple[str, float]]:
        """Use every group once, so that all connections exist; return each one's name and seconds.

        NCCL connects the ranks of a group when it is first used, while every later rank of a pipeline waits.  All ranks
        must call this at the same place: they use groups in the order of their creation, in which none waits in a ring.

        Args:
            summed_links: links that also sum tensors, for which NCCL makes a connection apart from that of transfers.
        """
        device, seconds = current_device(self._backend), list[tuple[str, float]]()
        for axes in self._groups:
            begin = time.perf_counter()
            self.all_reduce(torch.ones(1, device=device), axes).wait().item()
            seconds.append(("x".join(axes), time.perf_counter() - begin))
        for link, sender in self._links:
            begin, x = time.perf_counter(), torch.ones(1, device=device)
            (self.send if self.mesh.coord(link.axis) == sender else self.receive)(x, link).wait().item()
            (receiver,) = {*link.ends} - {sender}
            seconds.append((f"{link.axis} {sender} to {receiver}", time.perf_counter() - begin))
        for link in summed_links:
            if self.mesh.coord(link.axis) in link.ends:
                begin = time.perf_counter()
                self.all_reduce_pair(torch.ones(1, device=device), link).wait().item()
                seconds.append((f"{link.axis} {link.low} + {link.high}", time.perf_counter() - begin))
        return seconds

    def _far_end(self, link: Link, what: str) -> tuple[dist.ProcessGroup, int]:
        """Return the group of a link for a send, a receive or an all-reduce, and the rank of the other end."""
        made = dict.fromkeys(each for each, _ in self._links)
        assert link in made, f"no group was made for {link}; there are {list(made)}"
        (other,) = {*link.ranks(self.mesh)} - {self.mesh.rank}
        self.log.start((link, what), what)
        mine = self.mesh.coord(link.axis)
        sender = {"send": mine, "receive": link.low + link.high - mine, "all_reduce": link.low}[what]
        return self._links[link, sender], other

    def set_wait_hook(self, hook: WaitHook | None) -> None:
        """Enter `hook(axes)` while this rank waits for a collective over these axes; None removes the hook."""
        self._wait_hook = hook or _no_hook

    @property
    def axis_sets(self) -> tuple[Axes, ...]:
        """Return all sets of axes that have a group, in the same order on all ranks."""
        return tuple(self._groups)

    def _pending(
        self,
        work: dist.Work | Works | None,
        x: Tensor,
        axes: Axes,
        result: Callable[[Tensor], Tensor] = lambda x: x,
        sent: Tensor | None = None,
    ) -> Pending:
        """Return a `Pending` of `result(x)` once `work` is done; until then it keeps what is sent alive.

        gloo and NCCL do so themselves, but not the process group of dry runs.
        """
        assert work is not None, "this rank is not in its own group"
        started = self.log.last
        wait: Callable[[], object] = work.wait
        if self._backend == CPU_BACKEND and not isinstance(work, Works):
            LOSSES.start(work)
            wait = partial(wait_for_collective, work)

        def finish(sent: Tensor | None = sent) -> Tensor:
            self.log.wait(started)
            with self._wait_hook(self._live(axes)):
                wait()
            return result(x)

        return Pending(finish, _never if self._is_fake else work.is_completed)

    def _group(self, axes: Axes, what: str) -> tuple[dist.ProcessGroup | None, int]:
        live = self._live(axes)
        assert not live or live in self._groups, f"no group was made for {live}; there are {list(self._groups)}"
        if live:
            self.log.start(live, what)
        return self._groups.get(live), self.mesh.size(live)

    def _parts(self, axes: Axes) -> tuple[Axes, ...]:
        """Return the sets of axes that make up all ranks, where `axes` are all and have no group; else ()."""
        live = self._live(axes)
        has_parts = live not in self._groups and live == self.mesh.nontrivial(self.mesh.names)
        return disjoint_cover(live, self._groups) if has_parts else ()

    def _live(self, axes: Axes) -> Axes:
        """Return the axes of size above 1, in the mesh's order."""
        if axes not in self._lives:
            self._lives[axes] = self.mesh.nontrivial(self.mesh.in_order(axes))
        return self._lives[axes]

    def _order(self, axes: Axes) -> list[int] | None:
        """Return the position of each shard of `axes` in the group's order; None where the orders are equal."""
        if axes not in self._orders:
            place = {rank: index for index, rank in enumerate(sorted(self.mesh.ranks(axes)))}
            order = [place[rank] for rank in self.mesh.ranks(axes)]
            self._orders[axes] = None if order == sorted(order) else order
        return self._orders[axes]

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        if (parts := self._parts(axes)) and dim == 0 and axes == self.mesh.in_order(axes):
            return all_gather_by_parts(self, x, parts)
        group, ranks = self._group(axes, "all_gather")
        if ranks == 1:
            return completed(x)
        x = x.contiguous()
        out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        work = _all_gather(out, x, group=group, async_op=True)
        order = self._order(axes)
        return self._pending(work, out, axes, lambda out: joined(out, ranks, order, dim), sent=x)

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        group, ranks = self._group(axes, "all_gather")
        if ranks == 1:
            return completed(whole)
        assert whole.shape[0] % ranks == 0, f"{tuple(whole.shape)} does not divide by {axes}={ranks} ranks"
        assert self._order(axes) is None, f"{axes} are not in the mesh's order"
        mine = whole.chunk(ranks)[self.mesh.index(axes)]
        return self._pending(_all_gather(whole, mine, group=group, async_op=True), whole, axes)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        group, ranks = self._group(axes, "reduce_scatter")
        if ranks == 1:
            return completed(x)
        assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} along {dim} does not divide by {axes}={ranks} ranks"
        x = below_one_another(x, ranks, self._order(axes), dim)
        if dist.get_backend(group) == CPU_BACKEND:  # gloo's reduce-scatter is an all-reduce, with twice the bytes
            shards = torch.empty_like(x)
            work = dist.all_to_all_single(shards, x, group=group, async_op=True)
            return self._pending(work, shards, axes, lambda shards: shards.unflatten(0, (ranks, -1)).sum(0), sent=x)
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        return self._pending(_reduce_scatter(out, x, group=group, async_op=True), out, axes, sent=x)

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        if parts := self._parts(axes):
            return all_reduce_by_parts(self, x, parts, op)
        group, ranks = self._group(axes, "all_reduce")
        if ranks == 1:
            return completed(x)
        x = x.contiguous()
        return self._pending(dist.all_reduce(x, _OPS[op], group=group, async_op=True), x, axes)

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        group, ranks = self._group(axes, "all_to_all")
        if ranks == 1:
            return completed(x)
        assert len(x) == ranks, f"{tuple(x.shape)} does not have one block for each of {axes}={ranks} ranks"
        order = self._order(axes)
        x = x.contiguous() if order is None else _in_order(x, [order.index(place) for place in range(ranks)])
        work = dist.all_to_all_single(out := torch.empty_like(x), x, group=group, async_op=True)
        return self._pending(work, out, axes, lambda out: out if order is None else _in_order(out, order), sent=x)

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        group, ranks = self._group(axes, "all_to_all")
        if ranks == 1:
            return completed(x)
        assert sum(sent) == len(x), f"{tuple(x.shape)} does not have the rows of {axes}: {list(sent)}"
        assert self._order(axes) is None, f"{axes} are not in the mesh's order"
        x, out = x.contiguous(), x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=group, async_op=True)
        return self._pending(work, out, axes, sent=x)

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        if self.mesh.world_size == 1:
            return list(blocks)
        if self._host_group is None:
            self._host_group = dist.new_group(backend=CPU_BACKEND) if self._backend == GPU_BACKEND else dist.group.WORLD
        sent, mine = torch.tensor([len(block) for block in blocks]), self.mesh.rank
        sizes = torch.empty_like(sent)
        wait_for_collective(dist.all_to_all_single(sizes, sent, group=self._host_group, async_op=True))
        total = int(sizes.sum())
        enough = memory is not None and len(memory) >= total
        received = (memory[:total] if memory is not None and enough else torch.empty(total, dtype=torch.uint8)).split(
            sizes.tolist()
        )
        received[mine].copy_(blocks[mine])
        # Messages instead of an all-to-all, which needs all blocks in one tensor.
        works = [
            move(block, rank, group=self._host_group)
            for move, each in ((dist.irecv, received), (dist.isend, blocks))
            for rank, block in enumerate(each)
            if rank != mine and len(block)
        ]
        Works(works, CPU_BACKEND).wait()
        return list(received)

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        group, ranks = self._group(axes, "shift")
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        members, mine, x = self.mesh.ranks(axes), self.mesh.index(axes), x.contiguous()
        if by % ranks == 0:
            return completed(out.copy_(x))
        send = dist.P2POp(dist.isend, x, members[(mine + by) % ranks], group)
        receive = dist.P2POp(dist.irecv, out, members[(mine - by) % ranks], group)
        return self._pending(Works(dist.batch_isend_irecv([send, receive]), self._backend), out, axes, sent=x)

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        if shared := self._symmetric(a_MK.device, axes, "all_gather_matmul"):
            return matmul_rounds.fused_all_gather_matmul(a_MK, b_NK, shared)
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        if shared := self._symmetric(a_MK.device, axes, "matmul_reduce_scatter"):
            return completed(matmul_rounds.fused_matmul_reduce_scatter(a_MK, b_NK, dim, shared))
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

    def _symmetric(self, device: torch.device, axes: Axes, what: str) -> dist.ProcessGroup | None:
        """Return the group if its GPUs share symmetric memory, which its ranks find out together at its first use."""
        if self._backend != GPU_BACKEND or self._order(axes) is not None:
            return None
        if axes not in self._shared:
            votes = torch.tensor(matmul_rounds.votes(device), device=device)
            self._shared[axes] = matmul_rounds.is_shared(self.all_reduce(votes, axes, "max").wait().tolist())
        if not self._shared[axes]:
            return None
        group, _ = self._group(axes, what)
        self.log.wait(self.log.last)
        return group

    def send(self, x: Tensor, link: Link) -> Pending:
        group, other = self._far_end(link, "send")
        x = x.contiguous()
        return self._pending(Works([dist.isend(x, other, group=group)], self._backend), x, (link.axis,))

    def receive(self, out: Tensor, link: Link) -> Pending:
        group, other = self._far_end(link, "receive")
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        return self._pending(Works([dist.irecv(out, other, group=group)], self._backend), out, (link.axis,))

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        group, _ = self._far_end(link, "all_reduce")
        return self._pending(dist.all_reduce(x, group=group, async_op=True), x, (link.axis,))

    def barrier(self) -> None:
        if self.mesh.world_size > 1:
            hook, self._wait_hook = self._wait_hook, _no_hook
            self.all_reduce(torch.zeros(1, device=current_device(self._backend)), self.mesh.names).wait().item()
            self._wait_hook = hook

    def gather_object(self, value: Any) -> list[Any] | None:
        return self._objects.gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._objects.broadcast_object(value)
