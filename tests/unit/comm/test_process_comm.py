"""Fact: a collective over axes does what the mesh defines: pieces in the order of the fused index, along any dim.

The order of the axes does not matter; axes of size 1 move nothing; objects go to and from rank 0; sends of one end of a
link match receives of the other, in order, during any other traffic.
"""

from __future__ import annotations

import contextlib
import re
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron3d.comm.interface import completed
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.mesh import Axes, Link, Mesh, matchings
from tests.support.pool import Pool
from tests.support.turn_ranks import make_comm, run_turns

AXES = (("data", 2), ("one", 1), ("x", 2), ("y", 2))
SETS: list[Axes] = [axes for count in (1, 2, 3) for axes in permutations(("data", "x", "y"), count)]
SHAPE = (8, 16, 8)


def value(rank: int) -> Tensor:
    """Return a rank's own tensor; sums over eight ranks are exact."""
    return torch.randint(-1000, 1000, SHAPE, generator=torch.Generator().manual_seed(rank)).double()


def wrong_collectives(rank: int, world_size: int) -> list[str]:
    mesh = Mesh(AXES, rank)
    comm = make_comm(mesh, SETS)
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
        for blocks in (value(rank), value(rank).movedim(2, 0)):
            blocks = blocks.unflatten(0, (ranks, -1))
            sent = [
                value(other) if blocks.is_contiguous() else value(other).movedim(2, 0) for other in mesh.ranks(axes)
            ]
            mine = torch.stack([each.unflatten(0, (ranks, -1))[mesh.index(axes)] for each in sent])
            check(comm.all_to_all(blocks, axes).wait(), mine, "all_to_all", axes, blocks.stride())
        if axes == mesh.in_order(axes):
            counts = [[(3 * a + b) % 4 for b in range(ranks)] for a in range(ranks)]  # rows from a to b, some of them 0
            me = mesh.index(axes)
            rows = value(rank).repeat(4, 1, 1)[: sum(counts[me])]
            sources = [
                value(other).repeat(4, 1, 1)[: sum(row)].split(row)[me]
                for other, row in zip(mesh.ranks(axes), counts, strict=True)
            ]
            got = comm.all_to_all_rows(rows, counts[me], [row[me] for row in counts], axes).wait()
            check(got, torch.cat(sources), "all_to_all of rows", axes)
            whole = torch.zeros(ranks * SHAPE[0], *SHAPE[1:]).double()
            whole.chunk(ranks)[mesh.index(axes)].copy_(value(rank))
            check(comm.all_gather_into(whole, axes).wait(), torch.cat(values), "fill", axes)
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
    assert pool.run(wrong_collectives, 8) == run_turns(wrong_collectives, 8) == [[]] * 8


PARTS: list[list[Axes]] = [
    [("data",), ("x",), ("y",)],
    [("data", "y"), ("x",)],
    [("x", "y"), ("x",), ("data",)],
]


def wrong_over_all(rank: int, world_size: int) -> list[str]:
    """Communicate over all ranks with groups of parts of the axes only."""
    mesh, wrong = Mesh(AXES, rank), []
    waits: list[Axes] = []
    for sets in PARTS:
        comm = ProcessComm(mesh, sets, has_world_group=False) if dist.is_initialized() else make_comm(mesh, sets)
        values = [value(other) for other in range(world_size)]
        mine = value(rank)
        wrong += [f"sum {sets}"] * (not comm.all_reduce(mine, mesh.names).wait().equal(torch.stack(values).sum(0)))
        wrong += [f"not in place {sets}"] * (not mine.equal(torch.stack(values).sum(0)))
        largest = comm.all_reduce(value(rank), ("data", "x", "y"), "max").wait()
        wrong += [f"max {sets}"] * (not largest.equal(torch.stack(values).amax(0)))
        wrong += [f"gather {sets}"] * (not comm.all_gather(value(rank), mesh.names, 0).wait().equal(torch.cat(values)))
        if isinstance(comm, ProcessComm):
            assert set(comm.axis_sets) == set(sets), "a group of all ranks was made"
            comm.set_wait_hook(lambda axes: contextlib.nullcontext(waits.append(axes)))
        comm.barrier()
    return wrong + [f"a barrier counts as waiting for {waits}"] * bool(waits)


def test_all_ranks_are_reached_over_parts_of_the_axes(pool: Pool) -> None:
    """Without a group of all ranks, and each rank once: the third case has a set that overlaps with others."""
    assert pool.run(wrong_over_all, 8) == run_turns(wrong_over_all, 8) == [[]] * 8


def objects(rank: int, world_size: int) -> tuple[list[Any] | None, Any]:
    comm = make_comm(Mesh((("x", world_size),), rank), [("x",)])
    comm.barrier()
    return comm.gather_object({"rank": rank}), comm.broadcast_object(f"from {rank}")


def test_objects_are_gathered_on_rank_0(pool: Pool) -> None:
    for gathered, *others in (pool.run(objects, 3), run_turns(objects, 3)):
        assert gathered == ([{"rank": 0}, {"rank": 1}, {"rank": 2}], "from 0")
        assert others == [(None, "from 0")] * 2


def blocks(rank: int, world_size: int) -> list[list[int]]:
    comm = make_comm(Mesh((("x", world_size),), rank), [("x",)])
    sent = [torch.full((3 * rank + other,), 10 * rank + other, dtype=torch.uint8) for other in range(world_size)]
    return [received.tolist() for received in comm.all_to_all_bytes(sent)]


def test_bytes_of_any_number_go_to_each_rank(pool: Pool) -> None:
    """Rank 0 sends none to itself; alone, a rank keeps its own."""
    expected = [[[10 * rank + mine] * (3 * rank + mine) for rank in range(3)] for mine in range(3)]
    assert pool.run(blocks, 3) == run_turns(blocks, 3) == expected
    assert blocks(0, 1) == [[]]


def refusals(rank: int, world_size: int) -> list[str]:
    comm = make_comm(Mesh((("x", 2), ("y", 2)), rank), [("x",)])
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
    for missing, uneven in (pool.run(refusals, 4)[0], run_turns(refusals, 4)[0]):
        assert re.fullmatch(r"no group was made for \('y',\); there are \[(\('x', 'y'\), )?\('x',\)\]", missing)
        assert "(4, 3) along 1 does not divide" in uneven


def test_one_process_needs_no_process_group() -> None:
    comm = ProcessComm(Mesh((("x", 1), ("y", 1))), [("x",), ("x", "y")])
    x = torch.arange(6.0).view(2, 3)
    for pending in (
        comm.all_gather(x, ("x",), 1),
        comm.reduce_scatter(x, ("x", "y"), 0),
        comm.all_reduce(x, ("y",)),
        completed(x),
    ):
        assert pending.wait() is x
    comm.barrier()
    assert comm.gather_object(3) == [3]
    assert comm.broadcast_object(3) == 3


EVERY_LINK = [Link("pipeline", low, high) for low, high in combinations(range(4), 2)]


def wrong_transfers(rank: int, world_size: int) -> list[str]:
    """Post three tensors each way over every link before waiting for any, with an all-reduce over another axis."""
    mesh = Mesh((("pipeline", 4), ("x", 2)), rank)
    comm = make_comm(mesh, [("x",)], EVERY_LINK)
    mine = [link for link in EVERY_LINK if mesh.coord("pipeline") in link.ends]

    def said(source: int, count: int) -> Tensor:
        return torch.arange(6.0).view(2, 3).T + 100 * source + 10 * count  # not contiguous

    leaving, arriving = [], []
    for count in range(3):
        for link in mine:
            (other,) = {*link.ranks(mesh)} - {rank}
            arriving.append((comm.receive(torch.empty(3, 2), link), said(other, count), link))
            leaving.append(comm.send(said(rank, count), link))
        total = comm.all_reduce(torch.tensor([1.0 + rank]), ("x",)).wait()
        assert total.item() == sum(1.0 + other for other in mesh.ranks(("x",))), "the sum has mixed with a transfer"
    wrong = [str(link) for pending, expected, link in arriving[::-1] if not torch.equal(pending.wait(), expected)]
    for pending in leaving:
        pending.wait()
    for link in mine:
        x = said(rank, 0).contiguous()
        expected = sum(said(other, 0) for other in link.ranks(mesh))
        wrong += [f"sum over {link}"] if not torch.equal(comm.all_reduce_pair(x, link).wait(), expected) else []
        wrong += [f"sum over {link} is not in place"] if not torch.equal(x, expected) else []
    return wrong


def test_links_deliver_tensors_in_order(pool: Pool) -> None:
    assert pool.run(wrong_transfers, 8) == run_turns(wrong_transfers, 8) == [[]] * 8


def link_refusals(rank: int, world_size: int) -> list[str]:
    comm = ProcessComm(Mesh((("pipeline", 3),), rank), [], [Link("pipeline", 0, 1)])
    messages = []
    for call in (
        lambda: comm.send(torch.ones(2), Link("pipeline", 1, 2)),
        lambda: comm.receive(torch.ones(2, 2).T, Link("pipeline", 0, 1)),
    ):
        with pytest.raises(AssertionError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_missing_links_and_non_contiguous_memory_are_refused(pool: Pool) -> None:
    missing, scattered = pool.run(link_refusals, 3)[0]
    assert missing.startswith("no group was made for Link(axis='pipeline', low=1, high=2); there are [Link(")
    assert scattered == "a tensor of strides (1, 2) cannot be received into"
    with pytest.raises(AssertionError, match="a link joins two ranks"):
        Link("pipeline", 2, 2)


@given(pairs=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])))
def test_rounds_have_every_link_once_and_no_rank_twice(pairs: set[tuple[int, int]]) -> None:
    links = [Link("pipeline", *pair) for pair in pairs]
    rounds = matchings(links)
    assert sorted(link for together in rounds for link in together) == sorted(links)
    for together in rounds:
        ends = [end for link in together for end in link.ends]
        assert len(ends) == len(set(ends))
    degrees = [sum(rank in link.ends for link in links) for rank in range(10)]
    assert max(degrees) <= len(rounds) <= max(2 * max(degrees) - 1, 0)


def test_a_chain_takes_two_rounds() -> None:
    """For any pipeline length each rank makes two groups, and the ends a third one for tied embeddings."""
    chain = [Link("pipeline", rank, rank + 1) for rank in range(99)]
    assert [len(together) for together in matchings(chain)] == [50, 49]
    assert len(matchings([*chain, Link("pipeline", 0, 99)])) <= 3
