"""Fact: collectives through host memory have the numbers of the communicator below, also inside a training step.

A copy that is not written back, or a result on the wrong device, would be found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron3d.comm.host_comm import HostComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.p2p import Link
from megatron3d.verify.layouts import StepTrace, trace
from tests.support.equality import VOCAB_SIZE, wrong
from tests.support.in_flight_bugs import LAYOUTS
from tests.support.turn_ranks import connect, make_comm, run_turns

LINK = Link("x", 0, 1)


def two_results(rank: int, world_size: int) -> list[Any]:
    """Return the results of every verb, and the tensors that verbs in place wrote to."""
    comm = HostComm(make_comm(Mesh((("x", 2), ("one", 1)), rank), [("x",)], [LINK]))
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


def test_every_verb_gives_the_numbers_of_the_communicator_below() -> None:
    x = [torch.arange(8.0).view(2, 4) + 10 * rank for rank in range(2)]
    total, flat = x[0] + x[1], [each.flatten() for each in x]
    for rank, found in enumerate(run_turns(two_results, 2)):
        expected = [torch.cat((x[0].T, x[1].T), 1), total[:, 2 * rank : 2 * rank + 2], x[0]]
        expected += [total.flatten(), flat[1], total.flatten(), torch.cat((flat[0][:4], flat[1][4:]))]
        assert found == [each.tolist() for each in expected], f"rank {rank}"


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
