"""What a piece of a step does, as torch's dispatcher sees it: operations of products, and bytes of all live tensors.

It works on tensors with values and on those that have shapes only, and reads neither.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Shapes = tuple[Any, ...]


def _product(a: Tensor, b: Tensor) -> int:
    """[.., m, k] by [.., k, n]."""
    return 2 * a.numel() * b.shape[-1]


def _attention(num_products: int) -> Callable[..., int]:
    """Products of q with k and of scores with v, all scores counted, as the field does."""

    def count(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
        return num_products * 2 * math.prod(q.shape[:-1]) * k.shape[-2] * q.shape[-1]

    return count


def _linear_pointwise(a: Tensor, b: Tensor, *_: Any) -> int:
    """oneDNN's, whose second operand is [n, k]."""
    return 2 * a.numel() * b.shape[0]


# Operations by the operator's name; of fused attention's backward four products, without the scores' own again.
COUNTS: Mapping[str, Callable[..., int]] = {
    "aten::mm": lambda a, b, *_: _product(a, b),
    "aten::bmm": lambda a, b, *_: _product(a, b),
    "aten::addmm": lambda _, a, b, *__: _product(a, b),
    "aten::addmm_": lambda _, a, b, *__: _product(a, b),
    "aten::baddbmm": lambda _, a, b, *__: _product(a, b),
    "mkldnn::_linear_pointwise": _linear_pointwise,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda _, q, k, v, *__: _attention(4)(q, k, v),
    "aten::_scaled_dot_product_flash_attention": _attention(2),
    "aten::_scaled_dot_product_flash_attention_backward": lambda _, q, k, v, *__: _attention(4)(q, k, v),
    "aten::_scaled_dot_product_efficient_attention": _attention(2),
    "aten::_scaled_dot_product_efficient_attention_backward": lambda _, q, k, v, *__: _attention(4)(q, k, v),
}


class Meter(TorchDispatchMode):
    """While active, counts.

    Args:
        existing: tensors that count from the start.
        resized: those among them whose memory comes and goes without an operation.

    Attributes:
        flops: operations of products so far.
        now: bytes of all storages that exist.
        peak: most of them after any operation since `restart`.
    """

    def __init__(self, existing: Iterable[Tensor] = (), resized: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops, self._bytes, self._held = 0, 0, dict[int, tuple[int, Any]]()
        self._resized = [each.untyped_storage() for each in resized]
        self._resized_keys = {storage._cdata for storage in self._resized}
        for each in existing:
            self._add(each)
        self.peak = self.now

    @property
    def now(self) -> int:
        """Bytes of all storages that exist."""
        return self._bytes + sum(storage.nbytes() for storage in self._resized)

    def restart(self) -> None:
        """Begin a new peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = COUNTS.get(func._schema.name)
        if count is not None:
            self.flops += count(*args)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self._resized_keys:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            self._bytes -= size
            self._held.pop(key, None)

        self._held[key] = size, weakref.ref(storage, forget)
        self._bytes += size
