"""Traffic of DTensor: bytes of every functional collective as a ring algorithm sends them, as in `comm.recording`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Passes of a ring over the larger of input and output.
_PASSES = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2}
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


class FunctionalTraffic(TorchDispatchMode):
    """Append to `wire_bytes` one number per collective of this rank; each collective spans the whole world."""

    def __init__(self) -> None:
        super().__init__()
        self.wire_bytes: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._record(func._opname.rstrip("_"), args, out)
        return out

    def _record(self, collective: str, args: tuple[Any, ...], out: Tensor) -> None:
        if collective not in _LOCAL:
            ranks = dist.get_world_size()
            whole_bytes = max(args[0].nbytes, out.nbytes)
            self.wire_bytes.append(_PASSES[collective] * whole_bytes * (ranks - 1) / ranks)
