"""Tensors that an activation of the MLP keeps from forward to backward, its output included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.model.linears import FC1, FC2
from megatron3d.model.recompute_spec import MLP_ACT


class KeptTensor(NamedTuple):
    """Tensor that is kept for backward: the module that needs it, its description, and its bytes."""

    site: str
    what: str
    num_bytes: int


class Kept(NamedTuple):
    """Tensor that an activation keeps, in multiples of its output; whether it is the input of the linear after it."""

    what: str
    size: int
    is_input: bool = False


def activation_tensors(local: LocalSizes, unit: int, linears: tuple[str, str] = (FC1, FC2)) -> Iterator[KeptTensor]:
    """Yield what the activation of a layer keeps, with or without its own recomputation.

    Args:
        unit: bytes of the activation's output.
        linears: sites of the linear before and of the one after.
    """
    kept, before, after = _ACTIVATIONS[local.arch.activation], *linears
    site = before.removesuffix("fc1") + "activation"
    if local.recompute.recomputes(MLP_ACT):
        yield KeptTensor(before, "output", (2 if local.is_gated else 1) * unit)
        kept = tuple(item for item in kept if item.what in _RECOMPUTED_KEEPS)
    yield from (KeptTensor(after if item.is_input else site, item.what, item.size * unit) for item in kept)


_INPUT = Kept("input", 1, is_input=True)
_GATED = Kept("gate and up", 2), Kept("gate activated", 1), _INPUT

# What an activation keeps of its own making; relu its result.
_RECOMPUTED_KEEPS = {"gate activated", "output", "relu", "gate clamped", "sigmoid", "up clamped, plus 1"}

# What rules of differentiation read: relu's its output, which is the input of fc2 as well, the others' their input.
_ACTIVATIONS: Mapping[str, tuple[Kept, ...]] = {
    "gelu": (Kept("input", 1), _INPUT),
    "gelu_tanh": (Kept("input", 1), _INPUT),
    "relu": (Kept("output", 1),),
    "squared_relu": (Kept("relu", 1), _INPUT),
    "swiglu": _GATED,
    "geglu": _GATED,
    "geglu_tanh": _GATED,
    "clamped_swiglu": (
        Kept("gate and up", 2),
        *(Kept(what, 1) for what in ("gate clamped", "sigmoid", "gate activated", "up clamped, plus 1")),
        _INPUT,
    ),
}
