"""Fact: ranks that take turns find a wrong use of the communicator, whatever the timing."""

from __future__ import annotations

import pytest
import torch

from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.p2p import Link
from tests.support.turn_ranks import make_comm, run_turns

LINK = Link("x", 0, 1)


def run_two(action):
    return run_turns(lambda rank, _: action(make_comm(Mesh((("x", 2),), rank), [("x",)], [LINK]), rank), 2)


def test_a_result_is_nan_until_it_is_waited_for():
    def read_early(comm, rank):
        x = torch.ones(3)
        pending = comm.all_reduce(x, ("x",))
        early = x.clone()
        pending.wait()
        whole = torch.full((2,), float(rank))
        gathered = comm.all_gather_into(whole, ("x",))
        return early.isnan().all().item(), x.tolist(), whole.isnan().tolist(), gathered.wait().tolist()

    assert run_two(read_early) == [
        (True, [2.0] * 3, [False, True], [0.0, 1.0]),
        (True, [2.0] * 3, [True, False], [0.0, 1.0]),
    ]


def test_an_input_that_changes_before_the_wait_is_refused():
    def change(comm, rank):
        x = torch.ones(3)
        pending = comm.all_gather(x, ("x",), 0)
        x += rank
        pending.wait()

    with pytest.raises(AssertionError, match=r"input of all_gather \(3,\) torch.float32 changed"):
        run_two(change)


def test_a_missing_rank_is_a_deadlock():
    with pytest.raises(AssertionError, match=r"deadlock: rank 1 waits for barrier of ranks \(0, 1\)"):
        run_two(lambda comm, rank: rank and comm.barrier())


def test_collectives_in_different_orders_are_refused():
    def cross(comm, rank):
        calls = [lambda: comm.all_reduce(torch.ones(2), ("x",)), lambda: comm.all_gather(torch.ones(2), ("x",), 0)]
        for pending in [call() for call in (calls if rank else calls[::-1])]:
            pending.wait()

    with pytest.raises(AssertionError, match=r"rank 1 calls all_reduce sum .* where other ranks .* call all_gather"):
        run_two(cross)


def test_a_tensor_that_nobody_receives_is_found():
    with pytest.raises(AssertionError, match=r"ranks did not all take part in: .*transfer"):
        run_two(lambda comm, rank: None if rank else comm.send(torch.ones(2), LINK))


def test_the_first_error_is_raised_and_ends_all_ranks():
    def fail(comm, rank):
        if rank:
            raise KeyError("rank 1")
        comm.barrier()

    with pytest.raises(KeyError, match="rank 1"):
        run_two(fail)
