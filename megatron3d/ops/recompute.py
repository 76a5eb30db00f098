"""Activation recomputation (activation checkpointing)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class KeptResults:
    """What forward has found and recomputation must not find again, such as the choice of experts."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return `find()` in forward, and in the recomputation what it has returned there."""
        found: T = self._found.pop(name) if name in self._found else self._keep(name, find())
        return found

    def _keep(self, name: str, found: T) -> T:
        self._found[name] = found
        return found


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args), saving only the arguments for backward and recomputing the rest there.

    No random state is saved, since dropout masks are a function of indices.
    """
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def recompute_from_input(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> AbstractContextManager[None]:
    """Return a context in which autograd saves x instead of y = function(x), and recomputes y in backward."""
    storage = y.untyped_storage()._cdata

    def compute() -> Tensor:
        with torch.no_grad():
            return function(x)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return compute if saved.untyped_storage()._cdata == storage and saved.shape == y_shape else saved

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    y_shape = y.shape
    del y
    hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return hooks if torch.is_grad_enabled() else contextlib.nullcontext()
