"""Fact: offloaded activations give the same numbers bit for bit, leave the device, and are back before they are used.

The streams of these tests copy as late as an accelerator's may, and new memory is filled with NaN, so that a missing
wait computes with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron3d.attention.context.attention import KeptResult, recomputed_attention
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.data.loader import BatchLoader
from megatron3d.ops import recompute as offload
from megatron3d.ops.recompute import (
    ActivationOffload,
    OutputAgain,
    SideStream,
    SideWork,
    host_memory,
    recompute_from_input,
)
from megatron3d.train.state import build_state
from megatron3d.train.step import StepSettings, train_step
from megatron3d.verify.layouts import RandomSamples
from tests.support.late_stream import LateStream
from tests.support.turn_ranks import connect, run_turns

CPU, SIZE, NUM_LAYERS = torch.device("cpu"), 8, 4


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory for copies with NaN."""
    empty, host = ActivationOffload.empty, host_memory
    monkeypatch.setattr(ActivationOffload, "empty", lambda self, num_bytes: empty(self, num_bytes).fill_(255))
    monkeypatch.setattr(offload, "host_memory", lambda *args: host(*args).fill_(255))


def layer(x: Tensor, w: Tensor) -> Tensor:
    q, k = F.linear(x, torch.cat((w, w))).tanh().chunk(2, dim=1)  # views of one tensor
    return x + torch.sigmoid(q.t() @ k) @ F.gelu(x)


def weights() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(NUM_LAYERS)]


def gradients(used: ActivationOffload | None, num_microbatches: int = 3) -> list[Tensor]:
    """Run all forwards and then all backwards, the last microbatch first; return the gradients."""
    ws, losses = weights(), []
    for number in range(num_microbatches):
        x = torch.full((SIZE, SIZE), number / 10.0, dtype=torch.float64).requires_grad_()
        offloaded = used.begin(ws, CPU) if used else None
        for w in ws:
            if offloaded is None:
                x = layer(x, w)
            else:
                with offloaded.group():
                    x = layer(x, w)
        losses.append(x.sum())
    for loss in reversed(losses):
        loss.backward()
    return [w.grad for w in ws if w.grad is not None]


def late(_: torch.device) -> LateStream:
    return LateStream()


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_same_bits(num_microbatches: int) -> None:
    """Catches a copy back that is not waited for, and memory that is freed before it has left."""
    expected, got = gradients(None, num_microbatches), gradients(ActivationOffload(late), num_microbatches)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("forgotten", ["arrival", "departure"])
def test_a_forgotten_wait_is_caught(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """Show that the streams of these tests find what they are for."""
    streams: list[LateStream] = []

    def make(_: torch.device) -> LateStream:
        streams.append(LateStream())
        return streams[-1]

    run = LateStream.run

    def forget(stream: LateStream, work: Callable[[], None]) -> SideWork:
        done = run(stream, work)
        return SideWork() if stream is streams[("departure", "arrival").index(forgotten)] else done

    monkeypatch.setattr(LateStream, "run", forget)
    assert any(grad.isnan().any() for grad in gradients(ActivationOffload(make)))


def test_activations_leave_the_device() -> None:
    """After a later layer has run, what an earlier one saved is only in host memory; slabs are used again."""
    used, ws = ActivationOffload(), weights()
    kept: list[StorageWeakRef] = []
    offloaded = used.begin(ws, CPU)
    x = torch.ones(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    for w in ws:
        with offloaded.group():
            y = x.sin()
            x = (y * y) @ w
        kept.append(StorageWeakRef(y.untyped_storage()))
        del y
    assert [ref.expired() for ref in kept] == [True, True, True, False]
    x.sum().backward()
    del x, offloaded
    counts = []
    for _ in range(4):
        gradients(used, 1)
        counts.append(len(used.slabs))
    assert counts[1:] == counts[1:2] * 3 and counts[-1] <= 2 * NUM_LAYERS


def recomputed_activation(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and what backward recomputes the activation from."""
    y = x @ w
    a = F.gelu(y)
    with recompute_from_input(F.gelu, y, a):
        return a @ w, y


def recomputed_core(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and the result of attention, which recomputation finds where forward has put it."""
    results: list[Tensor] = []

    def core(x: Tensor, kept: KeptResult) -> Tensor:
        found = kept.take()
        y = x.sin() if found is None else x.sin() * 0 + found[0]
        if found is None:
            results.append(y.detach())
            kept.put(y, y.detach().sum(-1))
        return y

    return recomputed_attention(core, x) @ w, results.pop()


def recomputed_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and what is saved next to the output of a norm that is recomputed."""
    y, beside = torch.tanh(x), x.sin()
    with OutputAgain(torch.tanh, x, y).context():
        return (y * beside) @ w, beside


@pytest.mark.parametrize("compute", [recomputed_activation, recomputed_core, recomputed_norm])
def test_what_recomputation_starts_from_leaves_the_device(
    compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """All bytes of what the layers before the last one keep are freed on the device, and backward is the same."""
    grads = []
    for used in (None, ActivationOffload(late)):
        ws, kept = weights(), list[StorageWeakRef]()
        offloaded = used.begin(ws, CPU) if used else None
        x = torch.ones(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
        y = x * 1
        for w in ws:
            with offloaded.group() if offloaded else nullcontext():
                y, inside = compute(y, w)
            kept.append(StorageWeakRef(inside.untyped_storage()))
            del inside
        freed = sum(ref.expired() for ref in kept) * x.nbytes
        y.sum().backward()
        grads.append([each.grad for each in (x, *ws) if each.grad is not None])
        assert freed == (0 if used is None else (NUM_LAYERS - 1) * x.nbytes)
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


class Recorder(SideStream, SideWork):
    """Runs work at once and notes it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def run(self, work: Callable[[], None]) -> SideWork:
        self.events.append(self.name)
        work()
        return self

    def hold_compute(self) -> None:
        self.events.append(f"wait {self.name}")

    def wait(self) -> None: ...


class Mark(torch.autograd.Function):
    """Identity that saves its input, and notes when its forward and backward run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], index: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.note = lambda: events.append(f"B{index}")
        events.append(f"F{index}")
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        assert len(ctx.saved_tensors) == 1, "unpacked"
        ctx.note()
        return grad, None, None


def test_copies_overlap_with_the_neighbouring_layers() -> None:
    """Catches a copy that is waited for at once, and a layer that is fetched only when it is needed."""
    events: list[str] = []
    names = iter(("out", "in"))
    used = ActivationOffload(lambda _: Recorder(next(names), events))
    x = torch.ones(2, requires_grad=True)
    offloaded = used.begin([], CPU)
    y = x * 1
    for index in range(4):
        with offloaded.group():
            y = Mark.apply(y, events, index)
    y.sum().backward()
    forward = ["F0", "out", "F1", "out", "wait out", "F2", "out", "wait out", "F3", "out", "wait out"]
    backward = ["in", "B3", "wait in", "in", "B2", "wait in", "in", "B1", "wait in", "B0"]
    assert events == [*forward, *backward]


def test_parameters_stay_in_place() -> None:
    """A weight whose memory ZeRO frees and restores keeps its place."""
    w = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with ActivationOffload(late).begin([w], CPU).group():
        y = F.linear(x * 1, w)
    with torch.no_grad():
        w.data.mul_(2)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(SIZE, SIZE))


LATENT = {
    "family": "llama",
    "kv_channels": None,
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}
FROM_LATENTS = "norms, and attention from its latents"  # with no latent of queries, which read a norm's output
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "selective": (1, {}, {"recompute_granularity": "selective"}),
    "whole layers": (1, {}, {"recompute_granularity": "full", "recompute_num_layers": 2}),
    "1f1b": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}, {}),
    "zb-v, ZeRO 3": (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "zero_stage": 3}, {}),
    "cores and activations on context ranks": (
        2,
        {"context_parallel_size": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp_act"]},
    ),
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    FROM_LATENTS: (
        2,
        {"context_parallel_size": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj", "layernorm"]},
    ),
}


def two_steps(rank: int, world_size: int, config: Config, offloads: bool) -> list[Tensor]:
    spec = RunSpec(config, world_size, 61, rank)
    state = build_state(spec, connect(spec), CPU)
    if offloads:
        state.model.recompute = replace(state.model.recompute, offloads=True)
        state.model.offload = ActivationOffload(late)
    train, samples = config.train, RandomSamples(1, 61, 8)
    sizes = train.micro_batch_size, train.global_batch_size
    loader = BatchLoader(samples, state.model.comm.mesh, spec.mode.batch_axes, *sizes, CPU)
    settings = StepSettings(1, train.global_batch_size * 8, train.global_batch_size)
    for _ in range(2):
        train_step(state, loader.step(state.consumed_samples), 1e-2, settings)
    return [flat.main.detach().clone() for flat in state.buffers.flat_buffers]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_with_offloading_are_equal(name: str) -> None:
    num_ranks, parallel, train = RUNS[name]
    model = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "hidden_dropout": 0.1}
    model |= LATENT if name == FROM_LATENTS else {}
    sizes = {"precision": "fp64", "micro_batch_size": 1, "global_batch_size": 8}
    config = Config.model_validate({"model": model, "parallel": parallel, "train": {**sizes, **train}})
    plain, offloaded = (run_turns(two_steps, num_ranks, config, each) for each in (False, True))
    for one, other in zip(plain, offloaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
