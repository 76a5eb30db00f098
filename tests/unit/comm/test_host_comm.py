"""Fact: collectives through host memory, also those that lag, have the numbers of the communicator below.

A copy that is not written back, or a result on the wrong device, would be found.  Where collectives lag, an input that
changes before the wait gives wrong numbers, and a result that is read before it is not a number.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron3d.comm.host_comm import HostComm, LaggingComm
from megatron3d.comm.interface import Comm
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Link, Mesh
from megatron3d.train.state import connect as train_connect
from megatron3d.verify.layouts import StepTrace, trace
from tests.support.equality import VOCAB_SIZE, wrong
from tests.support.in_flight_bugs import LAYOUTS
from tests.support.pool import Pool
from tests.support.turn_ranks import connect, make_comm, run_turns

LINK = Link("x", 0, 1)
LAG_S = 0.05


def two_results(rank: int, world_size: int) -> list[Any]:
    """Return the results of every verb, and the tensors that verbs in place wrote to."""
    return results_of(HostComm(make_comm(Mesh((("x", 2), ("one", 1)), rank), [("x",)], [LINK])), rank)


def lagging(rank: int) -> LaggingComm:
    return LaggingComm(ProcessComm(Mesh((("x", 2), ("one", 1)), rank), [("x",)], [LINK]), LAG_S)


def two_lagging_results(rank: int, world_size: int) -> list[Any]:
    return results_of(lagging(rank), rank)


def results_of(comm: Comm, rank: int) -> list[Any]:
    x = torch.arange(8.0).view(2, 4) + 10 * rank
    arrived = comm.receive(torch.empty(2, 4), LINK) if rank else comm.send(x, LINK)
    found = [comm.all_gather(x.T, ("x",), 1).wait(), comm.reduce_scatter(x, ("x",), 1).wait(), arrived.wait()]
    for start in (
        lambda t: comm.all_reduce(t, ("x",)),
        lambda t: comm.all_reduce(t, ("x",), "max"),
        lambda t: comm.all_reduce_pair(t, LINK),
        lambda t: comm.all_gather_into(t, ("x",)),
    ):
        written = x.flatten().clone()
        assert start(written).wait() is written, "the result is in place"
        found.append(written)
    assert comm.all_gather(x, ("one",), 0).wait() is x and comm.gather_object(rank) == (None if rank else [0, 1])
    assert comm.broadcast_object(rank) == 0
    comm.barrier()
    return [each.tolist() for each in found]


def check_results(results: list[list[Any]]) -> None:
    x = [torch.arange(8.0).view(2, 4) + 10 * rank for rank in range(2)]
    total, flat = x[0] + x[1], [each.flatten() for each in x]
    for rank, found in enumerate(results):
        expected = [torch.cat((x[0].T, x[1].T), 1), total[:, 2 * rank : 2 * rank + 2], x[0]]
        expected += [total.flatten(), flat[1], total.flatten(), torch.cat((flat[0][:4], flat[1][4:]))]
        assert found == [each.tolist() for each in expected], f"rank {rank}"


def test_every_verb_gives_the_numbers_of_the_communicator_below(pool: Pool) -> None:
    check_results(run_turns(two_results, 2))
    check_results(pool.run(two_lagging_results, 2))


def misuses(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return the sum of an input that changes before the wait, and what is read before another wait."""
    comm = lagging(rank)
    x = torch.ones(2)
    changed = comm.all_gather(x, ("x",), 0)
    x += 1
    y = torch.ones(2)
    pending = comm.all_reduce(y, ("x",))
    gathered = changed.wait().tolist()
    comm.barrier()  # the thread has read `y`
    early = y.tolist()
    pending.wait()
    return gathered, early


def test_wrong_uses_of_what_is_in_flight_give_wrong_numbers(pool: Pool) -> None:
    for gathered, early in pool.run(misuses, 2):
        assert gathered == [2.0] * 4 and all(math.isnan(value) for value in early)


def lagging_trace(rank: int, world_size: int, name: str) -> StepTrace | None:
    spec = RunSpec(LAYOUTS[name].config(), world_size, VOCAB_SIZE, rank)
    return trace(spec, LaggingComm(train_connect(spec), 0.001), 1)


@pytest.mark.parametrize("name", ["1d in rounds", "2d", "ZeRO 2", "ZeRO 3", "pipeline"])
def test_a_step_whose_collectives_lag_equals_one_process(pool: Pool, name: str) -> None:
    layout = LAYOUTS[name]
    (got, *_) = pool.run(lagging_trace, layout.num_ranks, name)
    assert got is not None, "rank 0 has the trace"
    assert wrong([(layout.model, layout.config())], [got], 1) == ""


def host_trace(rank: int, world_size: int, name: str) -> StepTrace | None:
    spec = RunSpec(LAYOUTS[name].config(), world_size, VOCAB_SIZE, rank)
    return trace(spec, HostComm(connect(spec)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2d", "ZeRO 3", "pipeline"])
def test_a_step_over_host_memory_equals_one_process(name: str) -> None:
    layout = LAYOUTS[name]
    (got, *_) = run_turns(host_trace, layout.num_ranks, name)
    assert got is not None, "rank 0 has the trace"
    assert wrong([(layout.model, layout.config())], [got], 1) == ""
