"""Seeded bugs in how collectives in flight are used, each with a small layout whose step meets it.

On NCCL such a bug gives wrong numbers only when the timing is unlucky.  Ranks that take turns (turn_ranks.py) must find
each of them, by a refused use of the communicator or by numbers that differ from those of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from megatron3d.comm.interface import Pending, completed
from megatron3d.pipeline import engine
from megatron3d.zero.flat_buffer import FlatBuffer
from tests.support.equality import MODELS, configure, tensor_keys
from tests.support.turn_ranks import TurnComm, TurnPending

GPT2, LLAMA = list(MODELS)[:2]
# How far a function may be from the communicator that it calls.
MAX_CALLS = 5

# Collectives that were started at the seeded place, one entry each.
Met = list[str]
Seed = Callable[[pytest.MonkeyPatch, Met], None]


class Layout(NamedTuple):
    """A model, the number of ranks, and the keys of sections `parallel` and `train`."""

    model: str
    num_ranks: int
    parallel: Mapping[str, Any]
    train: Mapping[str, Any] = {"micro_batch_size": 2, "global_batch_size": 8}

    def config(self) -> Any:
        """Return the configuration: three layers, and a global batch of two microbatches or more."""
        model = {**MODELS[self.model], "num_layers": 3}
        return configure(model, self.parallel, **self.train)


LAYOUTS: Mapping[str, Layout] = {
    "1d": Layout(LLAMA, 2, tensor_keys(("1d", "sequence_parallel"), (2,))),
    "1d in rounds": Layout(LLAMA, 2, tensor_keys(("1d", "sequence_parallel"), (2,)) | {"tp_comm_overlap": True}),
    "ring": Layout(LLAMA, 2, {"context_parallel_size": 2, "cp_comm_type": "p2p"}),
    "heads": Layout(LLAMA, 2, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
    "2d": Layout(LLAMA, 4, tensor_keys(("2d", "weight_stationary"), (2, 2))),
    "2d, LayerNorm": Layout(GPT2, 4, tensor_keys(("2d", "weight_stationary"), (2, 2))),
    **{f"ZeRO {stage}": Layout(LLAMA, 2, {"zero_stage": stage}) for stage in range(4)},
    "ZeRO 2, one bucket": Layout(
        LLAMA, 2, {"zero_stage": 2}, {"micro_batch_size": 2, "global_batch_size": 8, "bucket_mb": 25}
    ),
    "pipeline": Layout(GPT2, 2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    "zero bubble": Layout(LLAMA, 2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
}


def _is_below(place: str) -> bool:
    """Return whether a function `file:name` has called the communicator."""
    path, _, name = place.partition(":")
    frame = sys._getframe(2)
    for _ in range(MAX_CALLS):
        if frame.f_code.co_filename.endswith(f"megatron3d/{path}") and name in ("", frame.f_code.co_name):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _after(verb: str, place: str, change: Callable[[Any, TurnPending], Pending]) -> Seed:
    """Return a seed that replaces the pending result of a verb that is called at a place."""

    def seed(patch: pytest.MonkeyPatch, met: Met) -> None:
        original = getattr(TurnComm, verb)

        def changed(self: TurnComm, x: Any, *args: Any, **kwargs: Any) -> Pending:
            pending: Pending = original(self, x, *args, **kwargs)
            if not isinstance(pending, TurnPending) or not _is_below(place):
                return pending
            met.append(place)
            return change(x, pending)

        patch.setattr(TurnComm, verb, changed)

    return seed


def _no_wait(verb: str, place: str) -> Seed:
    """Leave out the wait, so that the memory of the result is read too early."""
    return _after(verb, place, lambda _, pending: completed(pending.memory))


def _write_input(verb: str, place: str) -> Seed:
    """Write to the input while it is in flight."""

    def change(x: torch.Tensor, pending: TurnPending) -> Pending:
        with torch.no_grad():
            x.mul_(2)
        return pending

    return _after(verb, place, change)


def _free(verb: str, place: str) -> Seed:
    """Free the storage of the input, or of the output in its place, while it is in flight."""

    def change(x: torch.Tensor, pending: TurnPending) -> Pending:
        x.untyped_storage().resize_(0)
        return pending

    return _after(verb, place, change)


def _replaced(owner: Any, name: str, wrong: Callable[..., Any]) -> Seed:
    """Replace a function by `wrong(original, *args)`."""

    def seed(patch: pytest.MonkeyPatch, met: Met) -> None:
        original = getattr(owner, name)

        def changed(*args: Any) -> Any:
            met.append(name)
            return wrong(original, *args)

        patch.setattr(owner, name, changed)

    return seed


def _keep_grad_buffer(take_grad: Callable[..., Any], flat: FlatBuffer) -> Any:
    buffer = flat.full_grad
    taken = take_grad(flat)
    flat.full_grad = buffer
    return taken


def _send_and_write(pass_on: Callable[..., Any], rank: engine.Engine, action: Any, x: torch.Tensor) -> None:
    """Let the next computation reuse the memory that the last one has sent."""
    for send in rank._sends_in_flight:
        if isinstance(send, TurnPending):
            send.memory.fill_(1)
    pass_on(rank, action, x)


def _receive_late(patch: pytest.MonkeyPatch, met: Met) -> None:
    """Post a receive when its input is needed, while sends wait until they are received."""
    receive = engine.ActivationTransfer.receive

    def late(self: engine.ActivationTransfer, link: Any) -> Pending:
        met.append("receive")
        return Pending(lambda: receive(self, link).wait())

    patch.setattr(engine, "MAX_SENDS_IN_FLIGHT", 0)
    patch.setattr(engine.ActivationTransfer, "receive", late)


class InFlightBug(NamedTuple):
    """A bug, the layout that meets it, and what finds it: a refusal, or else "numbers"."""

    name: str
    layout: str
    seed: Seed
    found_by: str


NUMBERS, WRITTEN, FREED = "numbers", r"the input of .* changed before the wait", r"was freed or resized"

BUGS = [
    InFlightBug("no wait for X in forward", "1d", _no_wait("all_gather", "linear/matmul.py:forward"), NUMBERS),
    InFlightBug("no wait for Y in forward", "1d", _no_wait("reduce_scatter", "linear/matmul.py:forward"), NUMBERS),
    InFlightBug("no wait for dY in backward", "1d", _no_wait("all_gather", "linear/matmul.py:backward"), NUMBERS),
    InFlightBug("no wait for dX", "1d", _no_wait("reduce_scatter", "linear/matmul.py:backward"), NUMBERS),
    *(
        InFlightBug(f"{name}, {verb}", "1d in rounds", seed("shift", f"comm/matmul_rounds.py:{verb}"), found_by)
        for name, seed, found_by in (("no wait", _no_wait, NUMBERS), ("input overwritten", _write_input, WRITTEN))
        for verb in ("all_gather_matmul", "matmul_reduce_scatter")
    ),
    *(
        InFlightBug(f"{name} of {what}", "ring", seed("shift", f"attention/context/exchanges.py:{place}"), found_by)
        for name, seed, found_by in (("no wait for a block", _no_wait, NUMBERS), ("input", _write_input, WRITTEN))
        for what, place in (("keys and values", "_start"), ("their gradients", "_travel_home"))
    ),
    InFlightBug(
        "no wait for heads", "heads", _no_wait("all_to_all", "attention/context/exchanges.py:whole_positions"), NUMBERS
    ),
    InFlightBug(
        "no wait for returning heads",
        "heads",
        _no_wait("all_to_all", "attention/context/exchanges.py:own_positions"),
        NUMBERS,
    ),
    InFlightBug("no wait for dW", "2d", _no_wait("reduce_scatter", "linear/matmul.py:wgrad"), NUMBERS),
    InFlightBug("no wait for W", "2d", _no_wait("all_gather", "linear/collectives.py:_all_gather"), NUMBERS),
    InFlightBug("no wait for a norm's squares", "2d", _no_wait("all_reduce", "ops/norm.py"), NUMBERS),
    InFlightBug("no wait for a norm's means", "2d, LayerNorm", _no_wait("all_gather", "ops/norm.py"), NUMBERS),
    InFlightBug("no wait for the loss", "1d", _no_wait("all_reduce", "ops/cross_entropy.py"), NUMBERS),
    InFlightBug("no wait for the embedding", "1d", _no_wait("reduce_scatter", "ops/embedding.py"), NUMBERS),
    InFlightBug("no wait for a received input", "pipeline", _no_wait("receive", "pipeline/engine.py"), NUMBERS),
    InFlightBug("no wait for the tied gradient", "pipeline", _no_wait("all_reduce_pair", "zero/buffers.py"), NUMBERS),
    InFlightBug("no wait for gradients, ZeRO 0", "ZeRO 0", _no_wait("all_reduce", "zero/flat_buffer.py"), NUMBERS),
    InFlightBug("no wait for gradients", "ZeRO 2", _no_wait("reduce_scatter", "zero/flat_buffer.py"), NUMBERS),
    InFlightBug("no wait for parameters", "ZeRO 1", _no_wait("all_gather_into", "zero/flat_buffer.py"), NUMBERS),
    InFlightBug("no wait for an FSDP unit", "ZeRO 3", _no_wait("all_gather_into", "zero/flat_buffer.py"), NUMBERS),
    InFlightBug("unit freed early", "ZeRO 3", _free("all_gather_into", "zero/flat_buffer.py"), FREED),
    InFlightBug("gradients freed early", "ZeRO 2", _free("reduce_scatter", "zero/flat_buffer.py"), FREED),
    InFlightBug("dW freed early", "2d", _free("reduce_scatter", "linear/matmul.py:wgrad"), FREED),
    InFlightBug("dW overwritten", "2d", _write_input("reduce_scatter", "linear/matmul.py:wgrad"), WRITTEN),
    InFlightBug(
        "main_grad reused", "ZeRO 2, one bucket", _replaced(FlatBuffer, "take_grad", _keep_grad_buffer), WRITTEN
    ),
    InFlightBug("sent activations overwritten", "pipeline", _write_input("send", "pipeline/engine.py"), WRITTEN),
    InFlightBug("sent memory used again", "pipeline", _replaced(engine.Engine, "_pass_on", _send_and_write), WRITTEN),
    InFlightBug("receive posted late", "pipeline", _receive_late, "deadlock"),
    InFlightBug("receive posted late, zero bubble", "zero bubble", _receive_late, "deadlock"),
]
