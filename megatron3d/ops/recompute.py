"""Computing again what backward needs, or keeping it in the host's memory, instead of on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
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


def offloaded(params: Iterable[Tensor]) -> AbstractContextManager[None]:
    """While this is entered, what is kept for backward, but for `params`, lies in pinned memory of the host.

    The copies are made in the stream that computes: after what makes a tensor, and before what uses it again.
    """

    staying = {param.untyped_storage()._cdata for param in params}

    def pack(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if saved.untyped_storage()._cdata in staying:
            return saved
        is_remote = saved.device.type != "cpu"
        there = torch.empty_strided(saved.size(), saved.stride(), dtype=saved.dtype, pin_memory=is_remote)
        return saved.device, there.copy_(saved.detach(), non_blocking=is_remote)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, there = packed
        return there.to(device, non_blocking=True)

    hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return hooks
