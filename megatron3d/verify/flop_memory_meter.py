"""FLOP and memory counter of a training step: FLOPs by torch's formulas, and bytes of all live storages.

It works on tensors with values and on fake tensors.  torch's `FlopCounterMode` itself does not fit next to a memory
counter: the gradient hooks of its `ModuleTracker` keep gradients alive (a zero-bubble stage of the tests had a peak of
223 instead of 149 kB) and take half as long again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

Shape = tuple[int, ...]


def _linear_flop(x_shape: Shape, w_shape: Shape, *_: object, **__: object) -> int:
    """Return the FLOPs of oneDNN's linear, X [..., K] by W [N, K]."""
    return 2 * math.prod(x_shape) * w_shape[0]


def _attention_flop(q_shape: Shape, k_shape: Shape, v_shape: Shape, *_: object, **__: object) -> int:
    """Return the FLOPs of scores and their product with v; a causal mask does not halve them.

    Heads of q may share one of k and v, which torch's own formula refuses in torch 2.11.
    """
    return 2 * math.prod(q_shape[:-1]) * v_shape[-2] * (q_shape[-1] + v_shape[-1])


def _attention_backward_flop(dy_shape: Shape, *qkv_shapes: Shape, **_: object) -> int:
    """Return the FLOPs of the four GEMMs that compute the gradients of q, k, v and the scores.

    torch's formula adds a fifth, the scores that the kernel recomputes.  That is what the hardware executes; four is
    what the model needs, which MFU and the closed forms count (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    q_shape, k_shape, v_shape = qkv_shapes[:3]
    return 2 * _attention_flop(q_shape, k_shape, v_shape)


def _qr_flop(shape: Shape, *_: object, **__: object) -> int:
    """Return the FLOPs of R and Q of square matrices (Golub and Van Loan, Matrix Computations, section 5.2)."""
    return 8 * math.prod(shape) * shape[-1] // 3


def _flash_flop(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, *rest: Any, out_val: Any, **named: Any) -> int:
    """Return the FLOPs of flash attention of [B, S, N, D]; torch's formula knows sequences between bounds alone."""
    if bounds is not None:
        k, v = (shared[:, :1].expand(-1, q.shape[1], -1) for shared in (k, v))
        found = flop_registry[torch.ops.aten._flash_attention_forward](q, k, v, bounds, *rest, **named, out_val=out_val)
        return int(found)
    return _attention_flop(*(t.transpose(1, 2).shape for t in (q, k, v)))


def _flash_backward_flop(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, out_val: Any, **named: Any
) -> int:
    """Return the FLOPs of four GEMMs, as `_attention_backward_flop` does."""
    return 2 * _flash_flop(q, k, v, *rest, out_val=out_val, **named)


def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Return torch's FLOP formulas, those of kernels for which torch has none, and ours of attention's backward."""
    aten = torch.ops.aten
    ours: Mapping[Any, Callable[..., int]] = {
        torch.ops.mkldnn._linear_pointwise: _linear_flop,
        aten.linalg_qr: _qr_flop,
        aten.baddbmm: lambda *_, **__: 0,  # scores that attention's backward recomputes from single operations
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
        aten._scaled_dot_product_flash_attention_backward: _attention_backward_flop,
        aten._scaled_dot_product_efficient_attention_backward: _attention_backward_flop,
        aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flop,
    }
    wrapped = {kernel: shape_wrapper(formula) for kernel, formula in ours.items()}
    flash = {aten._flash_attention_forward: _flash_flop, aten._flash_attention_backward: _flash_backward_flop}
    return {**flop_registry, aten.addmm_: flop_registry[aten.addmm], **wrapped, **flash}


class FlopMemoryMeter(TorchDispatchMode):
    """Counts the FLOPs and the live bytes of all torch operations that run while it is active.

    Args:
        existing: tensors that exist already.
        resized: those among them whose storage is resized in place, outside any operation, as ZeRO 3 does.

    Attributes:
        flops: FLOPs of GEMMs and attention so far.
        peak_bytes: most live bytes after any operation since the last `reset_peak`.
    """

    def __init__(self, existing: Iterable[Tensor] = (), resized: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops, self._fixed_bytes = 0, 0
        self._formulas = flop_formulas()
        self._live: dict[int, weakref.ref[Any]] = {}
        self._resized = [tensor.untyped_storage() for tensor in resized]
        self._resized_keys = {storage._cdata for storage in self._resized}
        for tensor in existing:
            self._add(tensor)
        self.peak_bytes = self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all live storages."""
        return self._fixed_bytes + sum(storage.nbytes() for storage in self._resized)

    def reset_peak(self) -> None:
        """Start a new peak at the bytes that are live now."""
        self.peak_bytes = self.num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._resized_keys:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            self._fixed_bytes -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, forget)
        self._fixed_bytes += size
