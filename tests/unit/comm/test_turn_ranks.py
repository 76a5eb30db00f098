"""Fact: ranks that take turns find a wrong use of the communicator, whatever the timing."""

from __future__ import annotations

import pytest
import torch

from megatron3d.parallel.mesh import Link, Mesh
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


def in_flight(comm, verb, x):
    """Start a verb on `x`."""
    calls = {
        "all_gather": lambda: comm.all_gather(x, ("x",), 0),
        "all_gather_into": lambda: comm.all_gather_into(x, ("x",)),
        "reduce_scatter": lambda: comm.reduce_scatter(x, ("x",), 0),
        "all_reduce": lambda: comm.all_reduce(x, ("x",)),
        "all_reduce_pair": lambda: comm.all_reduce_pair(x, LINK),
        "receive": lambda: comm.receive(x, LINK),
        "send": lambda: comm.send(x, LINK),
    }
    return calls[verb]()


@pytest.mark.parametrize("verb", ["all_gather_into", "all_reduce", "all_reduce_pair", "receive"])
def test_an_output_that_is_written_before_the_wait_is_refused(verb):
    def write(comm, rank):
        x = torch.ones(4)
        pending = in_flight(comm, "send" if verb == "receive" and rank else verb, x)
        x[2 if rank == 0 else 4 :].fill_(3)
        pending.wait()

    with pytest.raises(AssertionError, match=r"the output of .* was written before the wait"):
        run_two(write)


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
@pytest.mark.parametrize("verb", ["all_gather", "all_gather_into", "reduce_scatter", "all_reduce", "receive", "send"])
def test_memory_that_is_freed_or_resized_before_the_wait_is_refused(verb, num_bytes):
    others = {"receive": "send", "send": "receive"}

    def free(comm, rank):
        x = torch.ones(4)
        pending = in_flight(comm, others.get(verb, verb) if rank else verb, x)
        if rank == 0:
            x.untyped_storage().resize_(num_bytes)
        pending.wait()

    with pytest.raises(AssertionError, match=r"memory of .* was freed or resized before the wait"):
        run_two(free)


def test_nothing_is_done_before_it_is_waited_for():
    def ask(comm, rank):
        x = torch.ones(4)
        pending = comm.receive(x, LINK) if rank else comm.send(x, LINK)
        comm.barrier()
        done = pending.is_done()
        return done, pending.wait().tolist()

    assert run_two(ask) == [(False, [1.0] * 4)] * 2


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
