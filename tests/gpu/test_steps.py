"""Fact: whole steps on the GPU are those of the CPU: in float64 to rounding, in bf16 nearly, random bits exactly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint.async_saver import Snapshot
from megatron3d.checkpoint.pieces import Piece
from megatron3d.config.run_spec import RunSpec
from megatron3d.data.loader import BatchLoader
from megatron3d.ops.dropout import keep_mask
from megatron3d.ops.recompute import ActivationOffload
from megatron3d.optim.adamw import _random_bits, _round_stochastically, _salt
from megatron3d.parallel.mesh import Mesh
from megatron3d.train.state import build_state, connect
from megatron3d.train.step import Readout, StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples, StepTrace, differences, trace
from tests.support.equality import MODELS, RECOMPUTATIONS, VOCAB_SIZE, configure, reference
from tests.support.host_reads import NoHostReads
from tests.support.shards import normal

# torch's tracer and compiler emit warnings about themselves, which they hide only where warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")


def trace_of(name: str, device: torch.device, **train: Any) -> StepTrace:
    config = configure({**MODELS[name], "num_layers": 3}, {}, micro_batch_size=2, global_batch_size=4, **train)
    spec = RunSpec(config, 1, VOCAB_SIZE)
    found = trace(spec, connect(spec), 2, device=device)
    assert found is not None, "one process is rank 0"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_in_float64_are_those_of_the_cpu(device: torch.device, name: str) -> None:
    """Losses, gradients and parameters of every model, with dropout, and the loss in small chunks."""
    assert list(differences(reference(name, 3, 4), trace_of(name, device), 1e-9)) == []


@pytest.mark.parametrize("name", list(RECOMPUTATIONS)[1:])
def test_recomputation_changes_nothing(device: torch.device, name: str) -> None:
    model = next(iter(MODELS))
    got = trace_of(model, device, **RECOMPUTATIONS[name])
    assert list(differences(reference(model, 3, 4), got, 1e-9)) == []


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_near_float64(device: torch.device, name: str) -> None:
    expected, got = reference(name, 3, 4), trace_of(name, device, precision="bf16")
    for step in (1, 2):
        assert abs(got[f"loss of step {step}"].item() - expected[f"loss of step {step}"].item()) < 0.05
    assert all(values.isfinite().all() for values in got.values())


def test_the_same_run_twice_is_the_same(device: torch.device) -> None:
    """Atomics, or memory that a side stream still reads, would differ in the last bits or more."""
    name = list(MODELS)[1]
    one, two = (trace_of(name, device, precision="bf16") for _ in range(2))
    losses = [key for key in one if key.startswith("loss")]
    assert {key: one[key].item() for key in losses} == {key: two[key].item() for key in losses}


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Make everything an error that waits for the device; on a CPU, what would wait for a GPU."""
    if device.type == "cpu":
        with NoHostReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if "num_moe_experts" not in model])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_does_not_wait_in_a_step(device: torch.device, name: str, precision: str) -> None:
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    spec = RunSpec(configure(MODELS[name], {}, precision=precision, compile=False, **sizes), 1, VOCAB_SIZE)
    state, length = build_state(spec, connect(spec), device), spec.arch.seq_length
    loader = BatchLoader(RandomSamples(3, VOCAB_SIZE, length), spec.mesh, (), 2, 4, device)
    settings, readouts = StepSettings(1, 4 * length, 4), list[Readout]()
    for number in range(3):
        batch = loader.step(4 * number)
        with no_waits(device) if number else contextlib.nullcontext():  # the first step allocates
            readouts.append(Readout(train_step(state, batch, 1e-4, settings)))
            found = [readout.read() for readout in readouts[:-1]]
    assert all(math.isfinite(each.loss) and not each.stop_requests for each in found)


def test_dropout_masks_are_equal_in_every_bit(device: torch.device) -> None:
    rows, columns = torch.arange(2**40, 2**40 + 777), torch.arange(333)
    for key in (0, 2**62 + 12345):
        got = keep_mask(key, rows.to(device), columns.to(device), 0.1)
        assert torch.equal(got.cpu(), keep_mask(key, rows, columns, 0.1))


def test_stochastic_rounding_is_equal_in_every_bit(device: torch.device) -> None:
    weight, grad = (normal(10_001, seed=seed).float() for seed in (1, 2))
    here = noise(weight, grad)
    there = noise(weight.to(device), grad.to(device))
    assert torch.equal(there.cpu(), here)
    got = _round_stochastically(weight.to(device), there, 0)
    assert torch.equal(got.cpu().view(torch.int16), _round_stochastically(weight, here, 0).view(torch.int16))


def noise(weight: Tensor, grad: Tensor) -> Tensor:
    return _random_bits(weight, grad, _salt(torch.tensor(5.0, device=weight.device)))


def test_offloaded_tensors_come_back(device: torch.device) -> None:
    """Tensors of several layers return, non-contiguous ones too; parameters stay where they are."""
    weight = normal(65, 65, seed=1).to(device).requires_grad_()
    x = normal(65, 129, seed=2).to(device).T.requires_grad_()
    grads: list[tuple[Tensor, Tensor]] = []
    for offload in (None, ActivationOffload()):
        weight.grad = x.grad = None
        offloaded, y = offload and offload.begin([weight], device), x
        for _ in range(4):
            with offloaded.group() if offloaded else torch.enable_grad():
                y = (y @ weight.T).sin().T.contiguous().T
        y.square().sum().backward()
        assert weight.grad is not None and x.grad is not None, "both need a gradient"
        grads.append((weight.grad.clone(), x.grad.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_snapshot_holds_the_state_at_its_start(device: torch.device) -> None:
    """The state changes while the copy may still run; the change waits for it."""
    states = [torch.arange(2**22, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)]
    expected, snapshot = [x.cpu().clone() for x in states], Snapshot(device)

    def source(copy: Callable[[Tensor], Tensor]) -> Iterator[Piece]:
        for x in states:
            yield Piece(str(x.dtype), tuple(x.shape), ((0, len(x)),), copy(x))

    pieces = snapshot.take(source)
    snapshot.hold_update()
    for x in states:
        x.zero_()
    snapshot.wait()
    assert all(torch.equal(piece.tensor, x) for piece, x in zip(pieces, expected, strict=True))
    assert device.type == "cpu" or all(piece.tensor.is_pinned() for piece in pieces)


def test_a_loader_moves_what_it_reads(device: torch.device) -> None:
    """Batches that are copied while the next one is read keep their tokens."""
    samples = RandomSamples(3, 1000, 64)
    loader = BatchLoader(samples, Mesh((("data", 1), ("replica", 1))), (), 2, 4, device)
    batches = [loader.step(first) for first in range(0, 40, 4)]
    found = [batch.tokens.cpu().numpy() for step in batches for batch in step]
    assert np.array_equal(np.concatenate(found), samples.read(np.arange(40)))
