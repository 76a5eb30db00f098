"""Tensors that an activation of the MLP keeps from forward to backward, its output included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.model.linears import FC1, FC2
from megatron3d.model.recompute_spec import MLP_ACT


class KeptTensor(NamedTuple):
    """Tensor that is kept for backward: the module that needs it, its description, and its bytes."""

    site: str
    what: str
    num_bytes: int


def activation_tensors(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield what the activation of a layer keeps, with or without its own recomputation."""
    recomputes = local.recompute.recomputes(MLP_ACT)
    yield from _recomputed(local) if recomputes else _ACTIVATIONS[local.arch.activation](local)


def _input_and_output(local: LocalSizes) -> Iterator[KeptTensor]:
    yield KeptTensor("mlp.activation", "input", local.inner(local.ffn))
    yield KeptTensor(FC2, "input", local.inner(local.ffn))


def _output_only(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield the activation's output, which is fc2's input as well."""
    yield KeptTensor("mlp.activation", "output", local.inner(local.ffn))


def _gated(local: LocalSizes) -> Iterator[KeptTensor]:
    yield KeptTensor("mlp.activation", "gate and up", local.inner(2 * local.ffn))
    yield KeptTensor("mlp.activation", "gate activated", local.inner(local.ffn))
    yield KeptTensor(FC2, "input", local.inner(local.ffn))


def _squared_relu(local: LocalSizes) -> Iterator[KeptTensor]:
    yield KeptTensor("mlp.activation", "relu", local.inner(local.ffn))
    yield KeptTensor(FC2, "input", local.inner(local.ffn))


def _clamped(local: LocalSizes) -> Iterator[KeptTensor]:
    yield KeptTensor("mlp.activation", "gate and up", local.inner(2 * local.ffn))
    for what in ("gate clamped", "sigmoid", "gate activated", "up clamped, plus 1"):
        yield KeptTensor("mlp.activation", what, local.inner(local.ffn))
    yield KeptTensor(FC2, "input", local.inner(local.ffn))


def _recomputed(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield the activation's input, and what its own gradient needs."""
    yield KeptTensor(FC1, "output", local.inner((2 if local.is_gated else 1) * local.ffn))
    yield from (item for item in _ACTIVATIONS[local.arch.activation](local) if item.what in _RECOMPUTED_KEEPS)


# What an activation keeps of its own making; relu its result.
_RECOMPUTED_KEEPS = {"gate activated", "output", "relu", "gate clamped", "sigmoid", "up clamped, plus 1"}

# Which of them a rule of differentiation reads: relu's its output, the others' their input.
_ACTIVATIONS: Mapping[str, Callable[[LocalSizes], Iterator[KeptTensor]]] = {
    "gelu": _input_and_output,
    "gelu_tanh": _input_and_output,
    "relu": _output_only,
    "squared_relu": _squared_relu,
    "swiglu": _gated,
    "geglu": _gated,
    "geglu_tanh": _gated,
    "clamped_swiglu": _clamped,
}
