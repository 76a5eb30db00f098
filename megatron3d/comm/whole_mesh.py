"""Collectives over all ranks as collectives over parts of the mesh's axes, one after another.

    4 x 8 x 2 ranks:    over all 64    =    over data, then over pipeline, then over t

The parts have groups already, since training communicates over them.  A group of all ranks would be one communicator
more, with connections to every rank and its own memory on every GPU, for a few numbers per step.
"""

from __future__ import annotations

from torch import Tensor

from megatron3d.comm.interface import Comm, Pending
from megatron3d.parallel.mesh import Axes


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
