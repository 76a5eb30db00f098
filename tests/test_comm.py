"""Fact: a collective over axes is what the mesh says it is: pieces in the order of the fused index, whatever the order
of the axes, along any dim; axes of size 1 move nothing; objects go to and from rank 0.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.comm import ProcessComm, ready
from megatron3d.mesh import Axes, Mesh
from tests.pool import Pool

AXES = (("data", 2), ("one", 1), ("x", 2), ("y", 2))
SETS: list[Axes] = [axes for count in (1, 2, 3) for axes in permutations(("data", "x", "y"), count)]
SHAPE = (8, 16, 8)


def value(rank: int) -> Tensor:
    """A rank's own tensor; sums of eight are exact."""
    return torch.randint(-1000, 1000, SHAPE, generator=torch.Generator().manual_seed(rank)).double()


def wrong_collectives(rank: int, world_size: int) -> list[str]:
    mesh = Mesh(AXES, rank)
    comm = ProcessComm(mesh, SETS)
    wrong = []

    def check(got: Tensor, expected: Tensor, *what: object) -> None:
        if not torch.equal(got, expected):
            wrong.append(f"rank {rank}: {what}")

    for axes in SETS:
        values = [value(other) for other in mesh.ranks(axes)]
        total, ranks = torch.stack(values).sum(0), len(values)
        for dim in range(3):
            check(comm.all_gather(value(rank), axes, dim).wait(), torch.cat(values, dim), "all_gather", axes, dim)
            piece = total.chunk(ranks, dim)[mesh.index(axes)]
            check(comm.reduce_scatter(value(rank), axes, dim).wait(), piece, "reduce_scatter", axes, dim)
        check(comm.all_reduce(value(rank), ("one", *axes)).wait(), total, "sum", axes)
        check(comm.all_reduce(value(rank), axes, "max").wait(), torch.stack(values).amax(0), "max", axes)
    strided = value(rank).transpose(0, 1)
    everyone = torch.stack([value(other).transpose(0, 1) for other in range(world_size)]).sum(0)
    check(comm.all_reduce(strided, mesh.names).wait(), everyone, "sum of strided tensors")
    check(comm.all_gather(strided, ("y",), 1).wait()[:, :8], value(mesh.ranks(("y",))[0]).transpose(0, 1), "strided")
    flat = value(rank).flatten()
    comm.all_reduce(flat[100:200], mesh.names).wait()
    check(flat[:100], value(rank).flatten()[:100], "outside of a reduced view")
    check(flat[100:200], torch.stack([value(r).flatten()[100:200] for r in range(world_size)]).sum(0), "reduced view")
    return wrong


def test_collectives_follow_the_mesh(pool: Pool) -> None:
    assert pool.run(wrong_collectives, 8) == [[]] * 8


def objects(rank: int, world_size: int) -> tuple[list[Any] | None, Any]:
    comm = ProcessComm(Mesh((("x", world_size),), rank), [("x",)])
    comm.barrier()
    return comm.gather_object({"rank": rank}), comm.broadcast_object(f"from {rank}")


def test_objects_meet_on_rank_0(pool: Pool) -> None:
    gathered, *others = pool.run(objects, 3)
    assert gathered == ([{"rank": 0}, {"rank": 1}, {"rank": 2}], "from 0")
    assert others == [(None, "from 0")] * 2


def refusals(rank: int, world_size: int) -> list[str]:
    comm = ProcessComm(Mesh((("x", 2), ("y", 2)), rank), [("x",)])
    messages = []
    for call in (
        lambda: comm.all_reduce(torch.ones(4), ("y",)),
        lambda: comm.reduce_scatter(torch.ones(4, 3), ("x",), 1),
    ):
        with pytest.raises(AssertionError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_missing_groups_and_sizes_that_do_not_divide_are_refused(pool: Pool) -> None:
    missing, uneven = pool.run(refusals, 4)[0]
    assert missing == "no group was made for ('y',); there are [('x',)]"
    assert "(4, 3) along 1 does not divide" in uneven


def test_one_process_needs_no_process_group() -> None:
    comm = ProcessComm(Mesh((("x", 1), ("y", 1))), [("x",), ("x", "y")])
    x = torch.arange(6.0).view(2, 3)
    for pending in (
        comm.all_gather(x, ("x",), 1),
        comm.reduce_scatter(x, ("x", "y"), 0),
        comm.all_reduce(x, ("y",)),
        ready(x),
    ):
        assert pending.wait() is x
    comm.barrier()
    assert comm.gather_object(3) == [3]
    assert comm.broadcast_object(3) == 3
