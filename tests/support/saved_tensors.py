"""Measure which storages autograd saves during a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Saved:
    """Storages saved for backward, except those of the `known` tensors (parameters, shared tables)."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self._kept: dict[int, torch.UntypedStorage] = {}

    def pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._kept[storage.data_ptr()] = storage
        return t

    @property
    def num_bytes(self) -> int:
        """Return the total size of the storages, which stay referenced so that no address is reused while counting."""
        return sum(storage.nbytes() for storage in self._kept.values())


@contextmanager
def saved_beside(known: Iterable[Tensor]) -> Iterator[Saved]:
    """Record what a forward inside the context saves for backward."""
    saved = Saved(known)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        yield saved
