"""Size of the largest tensor that a computation allocates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Track elements and bytes of the largest tensor that any operation returns, those of `known` not counted."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.numel = self.num_bytes = 0
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(out) if isinstance(t, Tensor))
        made = [t for t in tensors if t.untyped_storage()._cdata not in self._known]
        self.numel = max([self.numel, *(t.numel() for t in made)])
        self.num_bytes = max([self.num_bytes, *(t.nbytes for t in made)])
        return out
