"""Fact: a flat buffer is reduced as soon as its last gradient is complete, overlapping with the rest of backward.

This happens once per step, or once per microbatch where gradients are sharded.  The norm counts each logical element
once; updated shards are all-gathered during the next forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.parallel.mesh import Mesh
from megatron3d.zero import Buffers, FsdpUnit, square_sum
from tests.support.fsdp_chain import CPU, HYBRID, MESH, Echo, chain, fill_main, parameters, sharding, spec
from tests.support.pool import Pool
from tests.support.shards import every_group

SUM, SCATTER, GATHER = ((f"begin {what}", f"end {what}") for what in ("sum", "scatter", "gather"))


def only(events: list[Any], *kinds: str) -> list[Any]:
    """Return the names of the events of the given kinds."""
    names = [event if isinstance(event, str) else event[0] for event in events]
    return [name for name in names if name.startswith(kinds)]


def train(model: nn.Module, buffers: Buffers, comm: Echo, *values: float) -> list[Any]:
    """Train a step of constant microbatches with these values; return the events from backward on."""
    comm.events.clear()
    buffers.begin_step(len(values))
    for value in values:
        model(torch.tensor(value)).sum().backward()
    buffers.reduce_grads()
    return comm.events


def test_flat_buffers_are_all_reduced_during_the_backward_of_earlier_layers() -> None:
    model, buffers, comm = chain(count=3, size=4)
    events = only(train(model, buffers, comm, 1.0), "backward", *SUM)
    begun = [event for layer in (2, 1, 0) for event in (f"backward of {layer}", "begin sum")]
    assert events == [*begun, "end sum", "end sum", "end sum"]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_flat_buffers_are_reduce_scattered_during_the_backward_of_earlier_layers(zero_stage: int) -> None:
    """Each reduce-scatter of sharded gradients ends before the next starts."""
    model, buffers, comm = chain(count=3, size=4, zero_stage=zero_stage)
    events = only(train(model, buffers, comm, 1.0), "backward", *SCATTER)
    early = ["end scatter"] * (zero_stage > 1)
    late = ["end scatter"] * (1 if early else 3)
    others = [event for layer in (1, 0) for event in (f"backward of {layer}", *early, "begin scatter")]
    assert events == ["backward of 2", "begin scatter", *others, *late]


def test_a_flat_buffer_waits_for_its_last_gradient() -> None:
    model, buffers, comm = chain(count=4, size=4, bucket_bytes=32)
    events = train(model, buffers, comm, 1.0)
    assert [e for e in events if e[0] == "begin sum"] == [("begin sum", ("data",), 8)] * 2
    assert events.index(("begin sum", ("data",), 8)) == events.index("backward of 2") + 1


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_microbatches_are_accumulated_and_reduced_once(zero_stage: int) -> None:
    model, buffers, comm = chain(count=2, size=2, zero_stage=zero_stage)
    fill_main(buffers, 2.0)
    for _ in range(2):
        found = only(train(model, buffers, comm, 1.0, 10.0, 100.0), "begin", "backward")
        events = [event for event in found if "gather" not in event]
        assert events[:4] == ["backward of 1", "backward of 0"] * 2 and "begin" not in " ".join(events[:5])
        for _, _, grad in buffers.shards("grad"):
            assert set(grad.tolist()) == {2 * 2 * 111.0}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_sharded_gradients_are_reduced_for_each_microbatch(zero_stage: int) -> None:
    model, buffers, comm = chain(count=2, size=2, zero_stage=zero_stage)
    fill_main(buffers, 2.0)
    for _ in range(2):
        assert only(train(model, buffers, comm, 1.0, 10.0, 100.0), "begin scatter") == ["begin scatter"] * 6
        for _, _, grad in buffers.shards("grad"):
            assert grad.tolist() == [2 * 2 * 111.0]
        assert all(flat.full_grad is None for flat in buffers.flat_buffers)


def test_a_late_gradient_is_not_lost() -> None:
    """A gradient that arrives after the count is complete must not be lost.

    Split backwards run in another order than microbatches: two gradients of one parameter reach the count before the
    other parameter has its first one.
    """
    model, buffers, _ = chain(count=2, size=2, zero_stage=2, bucket_bytes=1e6)
    fill_main(buffers, 1.0)
    buffers.begin_step(2)
    for _ in range(2):
        model[1](torch.full((2,), 3.0)).sum().backward()
    assert buffers.flat_buffers[0].num_grads == 2 and buffers.flat_buffers[0].full_grad is None
    for _ in range(2):
        model[0](torch.full((2,), 5.0)).sum().backward()
    buffers.reduce_grads()
    assert [grad.tolist() for _, _, grad in buffers.shards("grad") if len(grad)] == [[20.0, 20.0]]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_missing_gradient_is_an_error(zero_stage: int) -> None:
    model, buffers, _ = chain(count=2, size=2, zero_stage=zero_stage)
    buffers.publish()
    buffers.begin_step(1)
    model[1](torch.ones(2)).sum().backward()
    with pytest.raises(AssertionError, match=r"1 gradients of stage 0 never arrived: of 0\.weight"):
        buffers.reduce_grads()


def test_a_parameter_used_twice_is_counted_once() -> None:
    model, buffers, comm = chain(count=1, size=2)
    fill_main(buffers, 3.0)
    buffers.begin_step(1)
    model[0](model[0](torch.ones(2))).sum().backward()
    buffers.reduce_grads()
    assert [grad.tolist() for _, _, grad in buffers.shards("grad")] == [[12.0, 12.0]]
    assert only(comm.events, "begin") == ["begin sum"]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_reduce_scatter_within_and_all_reduce_between(zero_stage: int) -> None:
    """Replicas all-reduce shards; a buffer's all-reduce overlaps the reduce-scatter of the next."""
    model, buffers, comm = chain(count=2, size=4, zero_stage=zero_stage, mesh=HYBRID)
    fill_main(buffers, 1.0)
    events = [e for e in train(model, buffers, comm, 1.0) if "gather" not in e[0] and not isinstance(e, str)]
    if zero_stage == 0:
        assert [event[:2] for event in events[:2]] == [("begin sum", ("replica", "data"))] * 2
    else:
        begin, end = (("begin scatter", ("data",), 4), ("end scatter", ("data",), 4))
        assert events[:4] == [begin, end, ("begin sum", ("replica",), 2), begin]
    assert all(set(grad.tolist()) == {4.0} for _, _, grad in buffers.shards("grad"))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_may_be_reduced_in_bf16(zero_stage: int) -> None:
    """The gradients of each microbatch, or their sum, are rounded to bf16 for communication and accumulated in fp32."""
    model, buffers, comm = chain(count=1, size=2, zero_stage=zero_stage, reduce_dtype=torch.bfloat16)
    fill_main(buffers, 1.0)
    train(model, buffers, comm, 1.0, 2.0**-10)
    expected = 2 * (1 + 2.0**-10) if zero_stage >= 2 else 2.0
    (grad,) = (grad for _, _, grad in buffers.shards("grad"))
    assert set(grad.tolist()) == {expected} and grad.dtype == torch.float32


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_non_finite_step_leaves_no_gradients(zero_stage: int) -> None:
    """Padding, which no gradient overwrites, must not keep the NaN by which clipping multiplied it."""
    for rank in range(MESH.world_size):
        model, buffers, comm = chain(count=1, size=3, zero_stage=zero_stage, mesh=MESH.at(rank))
        fill_main(buffers, 1.0)
        train(model, buffers, comm, torch.nan)
        for flat in buffers.flat_buffers:
            flat.grad.mul_(torch.nan)
        train(model, buffers, comm, 1.0)
        assert buffers.square_norm().isfinite()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_norm_counts_every_logical_element_once(zero_stage: int) -> None:
    """The norm is summed over the ranks of a stage, whatever is replicated; stages hold different parameters."""
    specs = {
        "0": spec("whole", 4),
        "1": spec("split", 6, layout=(("x",),)),
        "2": spec("undecayed", 3, decay=False),
    }
    values = {"0": torch.arange(4.0), "1": torch.arange(6.0) + 10, "2": torch.tensor([5.0, 7.0, 9.0])}
    mesh = Mesh((("pipeline", 2), ("replica", 2), ("data", 2), ("x", 2)))
    total = 0.0
    for rank in range(8):
        here = mesh.at(rank)
        comm: Any = Echo(here)
        model = nn.ModuleDict({"all": parameters(3)})
        named = {0: {f"all.{name}": each for name, each in specs.items()}}

        blocks = [FsdpUnit("all", model["all"], 0, in_backward=False)]
        buffers = Buffers(model, named, comm, torch.float32, CPU, 1, sharding=sharding(zero_stage), units=blocks)
        for name, start, grad in buffers.shards("grad"):
            value = values[name[-1]].chunk(2)[here.coord("x")] if name == "all.1" else values[name[-1]]
            grad.copy_(value[start : start + len(grad)])
        total += buffers.square_norm().item()
    assert total == sum(value.square().sum().item() for value in values.values())


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_updated_shards_are_all_gathered_during_the_forward(zero_stage: int) -> None:
    """Each all-gather starts when the one before it is done and overlaps one unit, once per step.

    Bug that this finds: all are launched at once, and with one hardware queue the first unit waits for the last.
    """
    model, buffers, comm = chain(count=3, size=4, zero_stage=zero_stage)
    fill_main(buffers, 1.0)
    with torch.no_grad():
        model(torch.ones(4)), model(torch.ones(4))
    begin, end = ("begin gather", ("data",), 4), ("end gather", ("data",), 4)
    forward = ["forward of 0", "forward of 1", "forward of 2"]
    assert comm.events == [begin, end, begin, forward[0], end, begin, forward[1], end, forward[2], *forward]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_parameters_that_no_forward_has_used_are_complete_after_settling(zero_stage: int) -> None:
    """Replicas are compared, and checkpoints loaded, between steps."""
    model, buffers, comm = chain(count=3, size=4, zero_stage=zero_stage)
    fill_main(buffers, 1.0)
    with torch.no_grad():
        model[1](torch.ones(4))  # out of order: those before it are gathered as well, in one order on all ranks
    assert only(comm.events, "begin", "end") == ["begin gather", "begin gather", "end gather"]
    buffers.settle()
    assert only(comm.events, "begin", "end")[3:].count("end gather") == 2
    assert not any(flat.is_gathering for flat in buffers.flat_buffers)
    buffers.settle()
    assert only(comm.events, "begin").count("begin gather") == 3


def publish_twice(rank: int, world_size: int, zero_stage: int, dtype: torch.dtype) -> list[list[float]]:
    """Return the model's output after shards were overwritten while they were being all-gathered."""
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", world_size), ("x", 1)), rank)
    model, buffers, _ = chain(2, 1_000_003, zero_stage, mesh, dtype=dtype)
    buffers.comm = every_group(mesh)
    for value in (1.0, 2.0, 3.0):
        buffers.settle()
        for _, _, part in buffers.shards("main"):
            part.fill_(value + rank)
        buffers.publish()
    with torch.no_grad():
        return [module(torch.ones((), dtype=dtype)).unique().tolist() for module in model]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_weights_written_during_an_all_gather_are_used(pool: Pool, zero_stage: int, dtype: torch.dtype) -> None:
    """Loading a checkpoint right after building does this."""
    assert pool.run(publish_twice, 2, zero_stage, dtype) == [[[3.0, 4.0]] * 2] * 2


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5_000_000])
def test_the_norm_of_a_long_buffer_is_as_exact_as_of_a_short_one(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    expected = values.double().square().sum()
    assert (square_sum(values).double() / expected - 1).abs() < 1e-6


def test_one_process_communicates_nothing() -> None:
    alone = Mesh((("pipeline", 1), ("replica", 1), ("data", 1), ("x", 1)))
    for zero_stage in range(4):
        model, buffers, comm = chain(count=2, size=4, zero_stage=zero_stage, mesh=alone)
        buffers.comm = ProcessComm(alone, [])
        fill_main(buffers, 1.0)
        train(model, buffers, comm, 1.0)
        assert only(comm.events, "begin") == []
