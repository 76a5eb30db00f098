"""Fact: with sharded parameters, an FSDP unit is all-gathered during the previous unit and freed right after its use.

At most two units are whole at once, and the model never computes with outdated shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Pending
from megatron3d.ops.recompute import recomputed
from megatron3d.parallel.mesh import Axes
from megatron3d.zero import Buffers, FsdpUnit
from tests.support.fsdp_chain import CPU, MESH, Echo, Scale, chain, fill_main, sharding, spec

SIZE = 4


def shown(events: list[Any]) -> list[str]:
    """Return the events in words, with all-gathers named by their unit, which sizes identify."""
    names = {SIZE + 2 * i: str(i) for i in range(5)}
    return [
        event if isinstance(event, str) else f"{event[0]} {names[event[2]]}"
        for event in events
        if isinstance(event, str) or "gather" in event[0]
    ]


def uneven_chain(count: int, stages: tuple[int, ...] = (), head: bool = False) -> tuple[nn.ModuleList, Buffers, Echo]:
    """Return units of 4, 6, 8, ... elements; the last may be a head, whose backward does not need its weight."""
    comm: Any = Echo(MESH)
    is_head = [head and i == count - 1 for i in range(count)]
    model = nn.ModuleList(Scale(SIZE + 2 * i, str(i), comm.events, is_head[i]) for i in range(count))
    stage_of = stages or (0,) * count
    blocks = [FsdpUnit(str(i), module, stage_of[i], not is_head[i]) for i, module in enumerate(model)]
    specs = {
        stage: {f"{i}.weight": spec(str(i), SIZE + 2 * i) for i in range(count) if stage_of[i] == stage}
        for stage in dict.fromkeys(stage_of)
    }
    return model, Buffers(model, specs, comm, torch.float32, CPU, 1, sharding=sharding(3), units=blocks), comm


def run(blocks: Any, x: Tensor) -> Tensor:
    """Run some units; each gets a scalar, since sizes differ."""
    for block in blocks:
        x = block(x.mean())
    return x.sum()


def whole_bytes(buffers: Buffers) -> list[int]:
    """Return the bytes of each flat buffer that is allocated for all of its parameters."""
    return [n for flat in buffers.flat_buffers if (n := flat.params.untyped_storage().nbytes())]


def test_units_are_prefetched_in_forward_and_in_backward() -> None:
    model, buffers, comm = uneven_chain(3)
    fill_main(buffers, 1.0)
    loss = run(model, torch.ones((), requires_grad=True))
    assert shown(comm.events) == [
        "begin gather 0", "end gather 0", "begin gather 1", "forward of 0",
        "end gather 1", "begin gather 2", "forward of 1",
        "end gather 2", "forward of 2",
    ]  # fmt: skip
    comm.events.clear()
    buffers.begin_step(1)
    loss.backward()
    assert shown(comm.events) == [
        "backward of 2", "begin gather 2", "end gather 2", "begin gather 1",
        "backward of 1", "end gather 1", "begin gather 0",
        "backward of 0", "end gather 0",
    ]  # fmt: skip
    assert whole_bytes(buffers) == []


def test_the_last_unit_is_gathered_during_the_head() -> None:
    """Neither of the two units before the head is all-gathered again."""
    model, buffers, comm = uneven_chain(4, head=True)
    fill_main(buffers, 1.0)
    loss = run(model, torch.ones((), requires_grad=True))
    head = shown(comm.events)
    assert head[head.index("end gather 3") :] == ["end gather 3", "begin gather 2", "begin gather 1", "forward of 3"]
    comm.events.clear()
    loss.backward()
    gathers = [event for event in shown(comm.events) if "gather" in event]
    assert gathers == ["end gather 2", "end gather 1", "begin gather 0", "end gather 0"]


def test_evaluation_gathers_each_unit_once() -> None:
    model, buffers, comm = uneven_chain(4, head=True)
    fill_main(buffers, 1.0)
    with torch.no_grad():
        run(model, torch.ones(()))
    assert [event for event in shown(comm.events) if event.startswith("begin")] == [
        f"begin gather {i}" for i in range(4)
    ]
    assert whole_bytes(buffers) == []


def test_a_recomputed_forward_gathers_nothing_more() -> None:
    model, buffers, comm = uneven_chain(3)
    fill_main(buffers, 1.0)
    x = torch.ones((), requires_grad=True)
    for block in model:
        x = recomputed(block, x.mean())
    comm.events.clear()
    buffers.begin_step(1)
    x.sum().backward()
    assert shown(comm.events) == [
        "backward of 2", "begin gather 2", "end gather 2", "begin gather 1", "forward of 2",
        "backward of 1", "end gather 1", "begin gather 0", "forward of 1",
        "backward of 0", "end gather 0", "forward of 0",
    ]  # fmt: skip
    assert whole_bytes(buffers) == []


def test_units_that_are_recomputed_in_pairs_are_gathered_once_in_backward() -> None:
    """The first of a pair stays from its recomputation to its backward; it is prefetched in the meantime anyway."""
    model, buffers, comm = uneven_chain(4)
    fill_main(buffers, 2.0)
    loss = recomputed(
        lambda x: run(model[2:], x), recomputed(lambda x: run(model[:2], x), torch.ones(()).requires_grad_())
    )
    comm.events.clear()
    buffers.begin_step(1)
    with Most(buffers) as most:
        loss.backward()
    assert [e for e in shown(comm.events) if e.startswith("begin")] == [f"begin gather {i}" for i in (3, 2, 1, 0)]
    assert most.count == 2 and whole_bytes(buffers) == []


def test_recomputed_units_are_all_resharded_at_the_end() -> None:
    model, buffers, _ = uneven_chain(4)
    fill_main(buffers, 2.0)
    x = torch.ones((), requires_grad=True)
    loss = recomputed(lambda x: run(model[2:], x), recomputed(lambda x: run(model[:2], x), x))
    buffers.begin_step(1)
    loss.backward()
    buffers.reduce_grads()
    assert loss == 6 * 10 * 2**4 and x.grad == loss
    assert whole_bytes(buffers) == []


class Most(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the largest number of bytes of gathered flat buffers at any operation."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.buffers, self.bytes, self.count = buffers, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = whole_bytes(self.buffers)
        self.bytes, self.count = max(self.bytes, sum(sizes)), max(self.count, len(sizes))
        return func(*args, **(kwargs or {}))


def test_at_most_two_units_are_whole() -> None:
    model, buffers, _ = uneven_chain(5)
    fill_main(buffers, 1.0)
    with Most(buffers) as most:
        buffers.begin_step(2)
        losses = [run(model, torch.ones((), requires_grad=True)) for _ in range(2)]
        for loss in losses:
            loss.backward()
        buffers.reduce_grads()
    assert (most.count, most.bytes) == (2, 4 * (12 + 10))
    assert whole_bytes(buffers) == []


def test_stages_do_not_gather_for_each_other() -> None:
    """The next stage on this rank all-gathers its weights at its own computations, possibly microbatches later."""
    model, buffers, comm = uneven_chain(4, stages=(0, 0, 2, 2))
    fill_main(buffers, 1.0)
    x = torch.ones((), requires_grad=True)
    first = [run(model[:2], x) for _ in range(2)]
    assert [e for e in shown(comm.events) if e.startswith("begin")] == ["begin gather 0", "begin gather 1"] * 2
    second = [run(model[2:], y.detach().requires_grad_()) for y in first]
    comm.events.clear()
    buffers.begin_step(2)
    second[0].backward()
    first[0].backward()
    gathers = [event for event in shown(comm.events) if event.startswith("begin")]
    assert gathers == [f"begin gather {i}" for i in (3, 2, 1, 0)]
    assert whole_bytes(buffers) == []


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_model_computes_with_the_latest_shards(zero_stage: int) -> None:
    """Checked after an update, after an evaluation between steps, and after two updates in a row."""
    model, buffers, _ = chain(count=3, size=4, zero_stage=zero_stage)
    for value in (1.0, 2.0, 3.0, 5.0):
        fill_main(buffers, value)
        for _ in range(2):
            with torch.no_grad():
                assert set(model(torch.ones(())).tolist()) == {value**3}
        buffers.begin_step(1)
        x = torch.ones((), requires_grad=True)
        loss = model(x).sum()
        loss.backward()
        buffers.reduce_grads()
        assert loss.item() == 4 * value**3 and x.grad == 4 * value**3
        assert all(set(grad.tolist()) == {2 * value**2} for _, _, grad in buffers.shards("grad"))


def test_weights_may_be_resharded_and_written_between_forward_and_backward() -> None:
    """autograd does not treat an all-gather as a change of a saved tensor."""
    model, buffers, _ = chain(count=2, size=4, zero_stage=3)
    fill_main(buffers, 2.0)
    losses = [model(torch.ones((), requires_grad=True)).sum() for _ in range(3)]
    buffers.begin_step(3)
    for loss in losses:
        loss.backward()
    buffers.reduce_grads()
    assert all(set(grad.tolist()) == {2 * 3 * 2.0} for _, _, grad in buffers.shards("grad"))


def test_parameters_in_flight_cannot_be_freed() -> None:
    _, buffers, _ = chain(count=1, size=4, zero_stage=3)
    buffers.start_unshard("0")
    with pytest.raises(AssertionError, match=r"0\.weight are freed while they are gathered"):
        buffers.reshard("0")


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_sharded_gradients_are_whole_only_temporarily(zero_stage: int) -> None:
    """No full gradients exist between microbatches; within one, a buffer being filled and one being reduced."""
    model, buffers, comm = chain(count=5, size=4, zero_stage=zero_stage)
    fill_main(buffers, 1.0)
    whole: list[int] = []
    begin = comm.reduce_scatter

    def reduce_scatter(x: Tensor, axes: Axes, dim: int) -> Pending:
        whole.append(sum(flat.full_grad is not None for flat in buffers.flat_buffers))
        return begin(x, axes, dim)

    comm.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
    buffers.begin_step(2)
    for _ in range(2):
        model(torch.ones(())).sum().backward()
        assert len(buffers._reductions) == 1
        assert all(flat.full_grad is None for flat in buffers.flat_buffers)
    assert whole == [0] * 10
    assert all(len(flat.grad) in (0, 2) for flat in buffers.flat_buffers)
