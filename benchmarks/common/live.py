"""Bytes of all live tensors, as torch's dispatcher sees them created; memory inside libraries is not included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """While active, counts every storage that an operation returns; `existing` tensors are counted from the start.

    A storage counts with its current size, since some are freed and allocated again.

    Attributes:
        peak: largest number of bytes after any operation.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        for t in existing:
            self._add(t)
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the subclass's own operations are dispatched here again
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) in (Tensor, Parameter) and leaf.device.type != "meta":
                self._add(leaf)
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self._storages or self._storages[storage._cdata].expired():
            self._storages[storage._cdata] = StorageWeakRef(storage)

    @property
    def now(self) -> int:
        """Bytes of the storages that still exist."""
        held = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._storages.items()}
        self._storages = {key: ref for key, ref in self._storages.items() if held[key] is not None}
        return sum(storage.nbytes() for storage in held.values() if storage is not None)
