"""Computing again what backward needs, instead of keeping it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def repeated(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which backward keeps the arguments alone and computes the rest again.

    No random state is kept: ours is a function of indices.
    """
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def kept_as(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> AbstractContextManager[None]:
    """While this is entered, who keeps y = function(x) for backward keeps x in its place and computes y when needed."""
    address = y.data_ptr()

    def compute() -> Tensor:
        with torch.no_grad():
            return function(x)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return compute if saved.data_ptr() == address and saved.shape == y_shape else saved

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    y_shape = y.shape
    del y
    hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return hooks if torch.is_grad_enabled() else contextlib.nullcontext()
