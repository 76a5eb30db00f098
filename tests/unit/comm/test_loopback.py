"""Fact: a rank that communicates with itself has the shapes, FLOPs, calls and memory of the dry run of that rank.

A verb with another shape, or one that keeps a tensor longer than a real rank does, would be found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common.loopback import LoopbackComm
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron3d.comm.interface import Comm
from megatron3d.comm.recording import Recorder
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Link, Mesh
from megatron3d.train.state import build_state
from megatron3d.verify.dry_run import RankDryRun, measure_step, microbatches, run_rank
from tests.support.equality import FORMS, MODELS, VOCAB_SIZE, configure, tensor_keys

CPU = torch.device("cpu")
LLAMA = list(MODELS)[1]
TRAIN = {"micro_batch_size": 8, "precision": "bf16"}


def spec_of(parallel: dict[str, Any], world_size: int, rank: int, batch: int = 16) -> RunSpec:
    """Return a rank of a small bf16 run."""
    config = configure({**MODELS[LLAMA], "num_layers": 4}, parallel, **TRAIN, global_batch_size=batch)
    return RunSpec(config, world_size, VOCAB_SIZE, rank)


def looped(spec: RunSpec, has_values: bool) -> RankDryRun:
    """Return one measured step of a rank that communicates with itself."""
    recorder = Recorder(LoopbackComm(spec.mesh))
    return measure_step(build_state(spec, recorder, CPU, has_values), recorder, microbatches(spec))


CASES = [
    *(
        (tensor_keys(form, (2,) * len(shape)), 2 ** len(shape), 1)
        for form, shape in ((FORMS[1], "t"), (FORMS[3], "rc"))
    ),
    (tensor_keys(("3d", "tokens"), (2, 1, 2)), 4, 3),
    ({"zero_stage": 3}, 2, 1),
    ({"zero_stage": 2, "pipeline_model_parallel_size": 2}, 4, 2),
    ({"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"}, 4, 1),
]


@pytest.mark.parametrize(("parallel", "world_size", "rank"), CASES)
def test_a_looped_rank_is_the_dry_run_of_that_rank(parallel: dict[str, Any], world_size: int, rank: int) -> None:
    spec = spec_of(parallel, world_size, rank)
    with FakeTensorMode():
        fake = looped(spec, has_values=False)
    assert fake == run_rank(spec)


def test_a_looped_rank_computes_with_values() -> None:
    """The totals of a step with values are those without; the loss is a number."""
    spec = spec_of(tensor_keys(("3d", "tokens"), (2, 1, 2)) | {"pipeline_model_parallel_size": 2}, 8, 5)
    real, dry = looped(spec, has_values=True), run_rank(spec)
    assert real.entries == dry.entries and real.between == dry.between
    assert [counts.flops for _, counts in real.actions] == [counts.flops for _, counts in dry.actions]


def shapes(comm: Comm) -> list[Any]:
    """Return the results of the verbs on small tensors."""
    x, whole = torch.arange(12.0).view(4, 3), torch.arange(4.0)
    return [
        comm.all_gather(x, ("x",), 0).wait(),
        comm.all_gather(x, ("x",), 1).wait(),
        comm.reduce_scatter(x, ("x",), 0).wait(),
        comm.reduce_scatter(x.T, ("x",), 1).wait(),
        comm.all_gather_into(whole, ("x",)).wait(),
        comm.all_reduce(x, ("x",)).wait(),
    ]


def test_verbs_repeat_and_take_this_ranks_chunk() -> None:
    x = torch.arange(12.0).view(4, 3)
    expected = [torch.cat((x, x)), torch.cat((x, x), 1), x[2:], x[2:].T, torch.tensor([2.0, 3, 2, 3]), x]
    comm = LoopbackComm(Mesh((("x", 2),), 1))
    assert [each.tolist() for each in shapes(comm)] == [each.tolist() for each in expected]
    received = comm.receive(torch.zeros(1000), Link("x", 0, 1)).wait()
    assert abs(received.std().item() - 1) < 0.1
    assert comm.gather_object(3) is None and comm.broadcast_object(3) == 3
    assert LoopbackComm(Mesh((("x", 2),), 0)).gather_object(3) == [3, 3]
