"""Fact: training reads the numbers of a step one step later, from a copy that was enqueued right after it.

The host then waits for a step while the device computes the next one.  This catches `.item()` and branches on values
in a step, and numbers that are read from the device after the next step was enqueued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.attention.context.exchanges import Gathered
from megatron3d.attention.packed import positions_of
from megatron3d.comm.process_comm import ProcessComm, below_one_another, joined
from megatron3d.parallel.mesh import Mesh
from megatron3d.train import loop
from megatron3d.train.monitor.monitor import Monitor
from megatron3d.train.rollback import Rollbacks
from megatron3d.train.step import HostNumbers, Readout, StepResult, train_step
from tests.support.host_reads import NoHostReads
from tests.support.shards import normal
from tests.support.tiny_run import run, write_config

EXPERTS = (
    "model.family=llama",
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "model.moe_router_score_function=sigmoid",
    "model.moe_router_enable_expert_bias=true",
    "model.moe_shared_expert_intermediate_size=8",
    "model.moe_expert_capacity_factor=1.0",
)


@pytest.mark.parametrize("model", [(), ("model.family=llama", "train.precision=bf16"), EXPERTS], ids=len)
def test_nothing_between_reports_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...]
) -> None:
    entered = list[int]()

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            entered.append(1)
            with contextlib.nullcontext() if kwargs.get("is_logged") else NoHostReads():
                return function(*args, **kwargs)

        return call

    monkeypatch.setattr(loop, "train_step", guarded(train_step))
    monkeypatch.setattr(loop, "Readout", guarded(Readout))
    reads = ((Monitor, "end_step"), (Rollbacks, "after_step"), (loop.ExitLimits, "end_after"))
    for owner, name in reads:
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    spikes = ("train.rollback_loss_spike_score=50", "checkpoint.save_interval=2")
    done = run(write_config(tmp_path), "logging.log_interval=100", "train.train_iters=4", *spikes, *model)
    assert done.code == 0, done.err
    assert len(entered) == 4 * 5


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_put_in_order_without_an_index_of_the_host(dim: int) -> None:
    """Collectives over axes in another order than the mesh's."""
    x, order = torch.arange(24.0).view(6, 4) if dim == 0 else torch.arange(24.0).view(4, 6), [2, 0, 1]
    shards = x.chunk(3, dim)
    with NoHostReads():
        sent = below_one_another(x, 3, order, dim)
        received = joined(sent, 3, order, dim)
    assert torch.equal(sent, torch.cat([shards[order.index(place)] for place in range(3)]))
    assert torch.equal(received, x)


@pytest.mark.parametrize("places", [range(3, 9), [5], [0, 1, 2, 7, 8, 20], [1, 3, 5]], ids=str)
def test_positions_are_made_on_the_device(places: Sequence[int]) -> None:
    with NoHostReads():
        found = positions_of(places, torch.device("cpu"))
    assert found.dtype == torch.int64 and found.tolist() == list(places)


def test_key_heads_are_repeated_without_an_index_of_the_host() -> None:
    """Eight query heads of five key/value heads, which serve three, two or one of them."""
    given: Any = None
    comm = ProcessComm(Mesh((("x", 1),)), [])
    exchange = Gathered((), given, [0, 0, 0, 1, 2, 2, 3, 4], given, None, comm)
    kv = normal(2, 1, 5, 5, 6, seed=1)
    found = list[Tensor]()
    for part in exchange.parts:
        mine = kv[:, :, slice(*part.groups)]
        with NoHostReads():
            found.append(exchange._for_queries(part, mine))
    assert torch.equal(torch.cat(found, 2), kv[:, :, [0, 0, 0, 1, 2, 2, 3, 4]])


def test_a_step_is_read_when_the_next_one_is_enqueued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy starts before the next step, so that it does not wait for that one."""
    happened = list[str]()

    class Logged(Readout):
        def __init__(self, result: StepResult) -> None:
            super().__init__(result)
            self._number = sum(each.startswith("step") for each in happened)
            happened.append(f"copy {self._number}")

        def read(self) -> HostNumbers:
            happened.append(f"read {self._number}")
            return super().read()

    def logged(*args: Any, **kwargs: Any) -> StepResult:
        happened.append("step")
        return train_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", logged)
    monkeypatch.setattr(loop, "Readout", Logged)
    assert run(write_config(tmp_path), "train.train_iters=3").code == 0
    twice = [["step", f"copy {number}", *[f"read {number - 1}"] * 2 * (number > 1)] for number in (1, 2, 3)]
    assert happened == [*(each for step in twice for each in step), "read 3"]


def test_a_readout_holds_the_values_of_its_step() -> None:
    """The tensors of a step may change before they are read."""
    numbers = [torch.tensor(value) for value in (2.5, 1.0, 3.0)]
    loss, skipped, stops = numbers
    readout = Readout(StepResult(loss.double(), loss, skipped, stops, loss))
    for each in numbers:
        each.zero_()
    assert readout.read() == HostNumbers(2.5, True, 3)
