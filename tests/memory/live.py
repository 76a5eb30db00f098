"""Bytes of all tensors that exist at one time, as torch's dispatcher sees them made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
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
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    @property
    def now(self) -> int:
        """Bytes of the storages that still exist."""
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(num_bytes for _, num_bytes in self._storages.values())
