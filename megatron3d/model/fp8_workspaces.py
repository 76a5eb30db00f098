"""Bytes that linears with fp8 operands have for a moment, beyond what they keep.

    quantization     operand in fp32 | scaled | data in fp8                     then data and scales
    GEMM             both operands, dequantized | its result                    then that in the network's dtype

These are torch's operations (`linear/fp8.py`), as they run where no kernel reads fp8; where scales are powers of 2,
operands that were in bf16 are in bf16 throughout.  A kernel that quantizes blocks, as on GPUs, needs its result alone,
and a GEMM that reads fp8 none but its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron3d.linear.fp8_plan import LARGEST_BYTES, OperandSize, QuantizedMatmul, Recipe
from megatron3d.model.local_sizes import LocalMatmul, LocalSizes
from megatron3d.model.workspaces import LinearWork, Live
from megatron3d.parallel.matmul_plan import moves

# Bytes of an element in fp32, by way of which operands are quantized, and in fp16, by way of which they are restored.
_FP32, _FP16 = 4, 2
# Largest value, factor and inverse of a block.
_NUMBERS = 3


def restored_itemsize(local: LocalSizes, recipe: Recipe) -> int:
    """Return the bytes of an element of an operand that is restored: bf16's where that holds it, else fp32's."""
    return local.itemsize if recipe.has_powers and not local.is_fp16 else local.wide


def scaled_itemsize(itemsize: int, restored: int) -> int:
    """Return the bytes of an element that torch's operations scale, beside the value, before it is rounded to fp8."""
    return itemsize if restored < _FP32 else _FP32 * (1 + (itemsize != _FP32))


class _Memory(Live):
    """Bytes that live during the forward or backward of one linear.

    Attributes:
        value: bytes of an element that is dequantized.
    """

    def __init__(self, local: LocalSizes, fp8: QuantizedMatmul) -> None:
        super().__init__()
        self._local, self._fp8, self._has_kernels = local, fp8, local.kernels.multiplies_fp8
        self.value = restored_itemsize(local, fp8.recipe)

    def quantized(self, size: OperandSize, itemsize: int) -> int:
        """Let an operand of `itemsize` be quantized; return its bytes."""
        if not (self._local.kernels.on_gpu and self._fp8.recipe.block is not None):
            scaled = scaled_itemsize(itemsize, self.value)
            self.dead(self.born((scaled + 1) * size.numel + _NUMBERS * LARGEST_BYTES * size.num_scales))
        return self.born(size.num_bytes)

    def operand(self, dims: str, table: Mapping[str, str], first: str) -> int:
        """Let a stored operand be quantized and all-gathered; return the bytes that are multiplied.

        W that is stored in fp8 is multiplied as it is, and its transpose is a copy.
        """
        stored = self._fp8.stored(dims)
        if self._fp8.stores_w and set(dims) == {"N", "K"}:
            shard = self.born(stored.num_bytes * (dims == "KN"))
        else:
            shard = self.quantized(stored, self._local.itemsize)
        if not moves(table):
            return shard
        whole = self.gathered(self._local, stored.num_bytes, table, first)
        self.dead(shard)
        return whole

    def dequantized(self, dims: str) -> int:
        """Let the values of an operand come to be for a GEMM; return their bytes."""
        return 0 if self._has_kernels else self.restored(dims, self.value)

    def restored(self, dims: str, itemsize: int) -> int:
        """Let the values of an operand come to be in `itemsize`; return their bytes."""
        size, wide = self._fp8.multiplied(dims), max(itemsize, _FP32)
        beside = _FP16 if itemsize == wide else itemsize
        self.dead(self.born((wide + beside) * size.numel + wide * size.num_scales))
        return self.born(size.numel * itemsize)

    def product(self, a: str, b: str, numel: int, itemsize: int) -> int:
        """Let the product of two operands come to be, converted to `itemsize`; return its bytes."""
        values, own = (self.dequantized(a), self.dequantized(b)), itemsize if self._has_kernels else self.value
        result = self.born(numel * own)
        self.dead(*values)
        if own != itemsize:
            self.dead(result)
            self.top = max(self.top, self.now + numel * (own + itemsize))
            result = self.born(numel * itemsize)
        return result


def fp8_work(local: LocalSizes, matmul: LocalMatmul, fp8: QuantizedMatmul) -> LinearWork:
    """Return the bytes that a linear with fp8 operands has for a moment."""
    forward = _forward(local, matmul, fp8)
    at_dgrad, at_wgrad = _backward(local, matmul, fp8, has_wgrad=True)
    alone, _ = _backward(local, matmul, fp8, has_wgrad=False)
    late = _Memory(local, fp8)
    late.gathered(local, fp8.stored("KM").num_bytes, matmul.plan.x, "K")
    _wgrad(late, local, matmul)
    return LinearWork(forward, forward, at_dgrad, at_wgrad, alone, late.top)


def rows_backward(local: LocalSizes, fp8: QuantizedMatmul, rows: int, dw: int) -> int:
    """Return the bytes of dY, dX, and dY in fp8 of all rows, and of what one expert has for its two GEMMs.

    Args:
        fp8: the matmul of one expert; `dw`: bytes of its dW before it is added.
    """
    live, whole = _Memory(local, fp8), replace(fp8, m=rows)
    live.born(whole.multiplied("MN").numel * local.itemsize)
    live.quantized(whole.multiplied("MN"), local.itemsize)
    dx = fp8.multiplied("MK").numel
    live.born(whole.multiplied("MK").numel * local.itemsize)
    w = live.operand("KN", {}, "K")
    live.dead(w, live.product("MN", "KN", dx, local.itemsize))
    values = live.restored("MK", local.itemsize)
    live.dead(live.born(dw), values)
    return live.top


def _forward(local: LocalSizes, matmul: LocalMatmul, fp8: QuantizedMatmul) -> int:
    """Return the bytes of the operands as they are quantized, gathered and multiplied, and of Y."""
    live, plan = _Memory(local, fp8), matmul.plan
    x, kept = live.quantized(fp8.stored("MK"), local.itemsize), fp8.stored("KM")
    if not fp8.recipe.x.is_square:
        live.dead(kept.num_bytes)  # it is counted as kept
        live.quantized(kept, local.itemsize)
    whole_x = live.gathered(local, x, plan.x, "M")
    w = live.operand("NK", plan.w, "N")
    y = live.product("MK", "NK", matmul.y * local.mesh.size(plan.dy), local.itemsize)
    live.dead(whole_x, w)
    live.reduced(local, y, plan.y, "M")
    return live.top


def _backward(local: LocalSizes, matmul: LocalMatmul, fp8: QuantizedMatmul, has_wgrad: bool) -> tuple[int, int]:
    """Return the bytes of dY, W and X as they are gathered, and of dX; and those with dW in place of W."""
    live, plan, recipe = _Memory(local, fp8), matmul.plan, fp8.recipe
    given = live.born(matmul.y * local.itemsize)
    if recipe.sends_dy:
        dy = live.operand("MN", plan.dy, "M")
    else:
        wide_dy = live.gathered(local, given, plan.dy, "M")
    w = live.operand("KN", plan.w, "K")
    x = live.gathered(local, fp8.stored("KM").num_bytes, plan.x, "K") if has_wgrad else 0
    if not recipe.sends_dy:
        dy = live.quantized(fp8.multiplied("MN"), local.itemsize)
        live.quantized(fp8.multiplied("NM"), local.itemsize)
        live.dead(wide_dy)
    elif recipe.x.is_square:
        live.born(fp8.multiplied("NM").num_bytes)
    else:
        values = live.dequantized("MN")
        live.quantized(fp8.multiplied("NM"), live.value)
        live.dead(values)
    dx = live.product("MN", "KN", matmul.x * local.mesh.size(plan.x), local.itemsize)
    shards = live.reduced(local, dx, {axis: plan.x.get(axis) for axis in plan.n}, "M")
    if shards and not (local.overlap.input_grad and has_wgrad):
        live.dead(dx)
    live.dead(w, dy if plan.m or plan.k or plan.n else 0)
    top = live.top
    if not has_wgrad:
        return top, 0
    live.top = live.now
    _wgrad(live, local, matmul, x + fp8.multiplied("NM").num_bytes)
    return top, live.top


def _wgrad(live: _Memory, local: LocalSizes, matmul: LocalMatmul, operands: int = 0) -> None:
    """Let dW come to be, and be added to main_grad, or be reduced once its operands are gone."""
    if matmul.plan.w:
        dw = live.product("NM", "KM", matmul.whole_w, local.wgrad_itemsize)
        live.dead(operands)
        live.reduced(local, dw, matmul.plan.w, "N", lives=False)
    else:
        accumulates = live.value == local.wide and not local.adds_dw and not local.kernels.multiplies_fp8
        own = local.wide if local.kernels.multiplies_fp8 else live.value
        live.product("NM", "KM", 0 if accumulates else matmul.whole_w, own)
