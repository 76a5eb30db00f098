"""Bytes of all tensors that exist at one time, as torch's dispatcher sees them made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """While active, counts every storage that an operation returns; `existing` tensors are counted from the start.

    Attributes:
        peak: most bytes after any operation.
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
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)

    @property
    def now(self) -> int:
        """Bytes of the storages that still exist, which may have been resized."""
        alive = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._storages.items()}
        self._storages = {key: self._storages[key] for key, storage in alive.items() if storage is not None}
        return sum(storage.nbytes() for storage in alive.values() if storage is not None)
