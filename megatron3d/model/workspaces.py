"""Bytes that linears, the LM head and the embedding have for a moment, beyond what they keep.

A gathered operand, and a partial sum before its reduction, are as large as the shard times the number of ranks of the
collective.  Small tensors (a number per token) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.model.local_sizes import LocalMatmul, LocalSizes
from megatron3d.parallel.matmul_plan import MatmulPlan, moves


class Live:
    """Elements or bytes that live, and the most of them."""

    def __init__(self) -> None:
        self.now = self.top = 0

    def born(self, size: int) -> int:
        """Let something come to be; return its size."""
        self.now += size
        self.top = max(self.top, self.now)
        return size

    def dead(self, *sizes: int) -> None:
        """Let something go."""
        self.now -= sum(sizes)

    def gathered(self, local: LocalSizes, size: int, table: Mapping[str, str], first: str) -> int:
        """Let a shard of this size be gathered; along another dim than the first one a copy reorders it."""
        for axes, dim in moves(table)[::-1]:
            here, size = size, size * local.mesh.size(axes)
            self.born(size)
            if dim != first:
                self.dead(self.born(size))
            self.dead(here if axes != moves(table)[-1].axes else 0)
        return size if table else 0

    def reduced(
        self, local: LocalSizes, size: int, table: Mapping[str, str | None], first: str, lives: bool = True
    ) -> int:
        """Let a partial sum of this size be reduced; return the size of the result that is new.

        The partial sum lives on, or else is gone once it was sent.
        """
        made, partial = 0, 0 if lives else size
        for axes, dim in moves(table):
            if dim is None:
                continue
            here, size = size, size // local.mesh.size(axes)
            copied = self.born(here) if dim != first else 0
            received = self.born(here * local.kernels.num_received or size)
            self.dead(partial)
            self.born(size if local.kernels.num_received else 0)
            partial = 0
            self.dead(copied, received if local.kernels.num_received else 0, made)
            made = size
        return made


class LinearWork(NamedTuple):
    """Bytes that a linear has for a moment.

    Attributes:
        forward: in its forward; `again`: in one that finds its gathered weight.
        dgrad, wgrad: in the two halves of its backward; `dgrad_alone`: in one that defers the wgrad, `late`: in that.
    """

    forward: int
    again: int
    dgrad: int
    wgrad: int
    dgrad_alone: int
    late: int


def linear_work(local: LocalSizes, matmul: LocalMatmul) -> LinearWork:
    """Return the bytes that a linear has for a moment whose operands are as they are stored."""
    first = linear_forward(local, matmul)
    is_kept = bool(matmul.plan.w) and local.overlap.keep_gathered_weights
    again = linear_forward(local, matmul, gathers_w=False) if is_kept else first
    alone, _ = linear_backward(local, matmul, has_wgrad=False)
    return LinearWork(first, again, *linear_backward(local, matmul), alone, linear_wgrad(local, matmul))


def linear_forward(local: LocalSizes, matmul: LocalMatmul, gathers_w: bool = True) -> int:
    """Return the bytes of X and W as they are gathered, and of Y before and after its sum.

    `gathers_w`: W is not there yet.
    """
    live, plan, overlap = Live(), matmul.plan, local.overlap
    x = live.gathered(local, matmul.x, plan.x, "M")
    w = live.gathered(local, matmul.w, plan.w, "N") if gathers_w else 0
    y = live.born(matmul.y * local.mesh.size(plan.dy))
    live.dead(x, 0 if overlap.keep_gathered_weights else w)
    live.reduced(local, y, plan.y, "M")
    return live.top * local.itemsize


def linear_backward(local: LocalSizes, matmul: LocalMatmul, has_wgrad: bool = True) -> tuple[int, int]:
    """Return the bytes of dY, X and W as they are gathered, and of dX before and after its sum; and those with dW in
    place of W."""
    live, plan, overlap, size = Live(), matmul.plan, local.overlap, local.itemsize
    live.born(matmul.y)
    live.gathered(local, matmul.y, plan.dy, "M")
    w = 0 if overlap.keep_gathered_weights else live.gathered(local, matmul.w, plan.w, "N")
    x = live.gathered(local, matmul.x, plan.x, "M") if has_wgrad else 0
    dx = live.born(matmul.x * local.mesh.size(plan.x))
    table = {axis: plan.x.get(axis) for axis in plan.n}
    shards = live.reduced(local, dx, table, "M")
    if shards and not (overlap.input_grad and has_wgrad):
        live.dead(dx)
    live.dead(w)
    return live.top * size, (live.now - x) * size + _wgrad(local, matmul, x) if has_wgrad else 0


def linear_wgrad(local: LocalSizes, matmul: LocalMatmul) -> int:
    """Return the bytes of X as it is gathered, and of dW before and after its sum, where the wgrad is deferred."""
    live = Live()
    x = live.gathered(local, matmul.x, matmul.plan.x, "M")
    return max(live.top * local.itemsize, _wgrad(local, matmul, x))


def _wgrad(local: LocalSizes, matmul: LocalMatmul, x: int) -> int:
    """Return the bytes of the gathered X and of dW, and of dW as it is reduced."""
    if not matmul.plan.w:
        return (x + matmul.whole_w * local.adds_dw) * local.itemsize
    reducing = Live()
    reducing.reduced(local, reducing.born(matmul.whole_w), matmul.plan.w, "N")
    return max(x * local.itemsize + wgrad_bytes(local, matmul.whole_w), reducing.top * local.wgrad_itemsize)


def reduced_later(local: LocalSizes, matmul: LocalMatmul) -> int:
    """Return the bytes of a dW whose reduction is in flight until the next linear has its dW."""
    if not matmul.plan.w or not local.overlap.weight_grad:
        return 0
    axes, dim = moves(matmul.plan.w)[0]
    received = matmul.whole_w * local.kernels.num_received or matmul.whole_w // local.mesh.size(axes)
    return (matmul.whole_w + received * (dim is not None)) * local.wgrad_itemsize


def wgrad_bytes(local: LocalSizes, num_elements: int) -> int:
    """Return the bytes of a dW that is about to be reduced, on CPUs after another one in the network's dtype."""
    is_widened = local.itemsize < local.wgrad_itemsize and not local.kernels.on_gpu
    return num_elements * (local.wgrad_itemsize + is_widened * local.itemsize)


def _gathered(plan: MatmulPlan, x: int, w: int, dy: int) -> tuple[int, int]:
    """Return the elements of all-gathered operands, and the largest that a copy has to reorder.

    Collectives gather along the first dimension; along another one, the result is copied to reorder it.
    """
    tables = ((x, plan.x, "M"), (w, plan.w, "N"), (dy, plan.dy, "M"))
    gathered = sum(size for size, table, _ in tables if table)
    return gathered, max(size if set(table.values()) - {first} else 0 for size, table, first in tables)


def head_forward(local: LocalSizes) -> dict[str, int]:
    """Return the bytes of the last chunk of logits and its gradients, and of the head's dW before and after its sum.

    They are the norm's output, scaled as well where the model says so, and the gathered W and X of the chunk; then
    partial logits and their sum; the logits in fp32 and their gradient in the model's dtype, which a fused loss writes
    into the logits' memory; after that the gradient, the gathered dY, and partial dX with its sum, or dX and dW of the
    chunk unless its GEMM accumulates; at the end dX of the chunks.  If dW is reduced, its sum has a buffer of its own.
    All of it is beyond the whole dX, of which the part of the last chunk comes to be in its GEMM.
    """
    size = local.itemsize
    plan, is_fused = local.mode.expand.on(local.mesh), local.kernels.fused_loss
    rows, ranks = local.chunk_rows
    vocabulary, features = local.part(local.arch.padded_vocab_size, plan.n), local.part(local.arch.hidden_size, plan.k)
    x, w = rows * ranks * features, vocabulary * features
    dy = rows * ranks * vocabulary
    gathered, reordered = _gathered(plan, x, w, dy)
    logits = dy // local.mesh.size(plan.dy)
    whole_dy = dy if plan.dy else 0
    is_capped = local.arch.logit_softcap is not None
    at_loss = logits * (local.wide + (0 if is_fused else local.narrow) + is_capped * local.wide)
    before = w * local.wide if plan.w and rows < local.tokens else 0
    dw = w * size if plan.w or local.adds_dw else 0
    if plan.w and not before:
        dw = wgrad_bytes(local, w)
    grad = logits * (local.wide if is_fused else size)
    to_come = local.residual * min(rows, local.tokens) // local.tokens  # of dX, before its GEMM
    at_sum, at_dx, reducing = Live(), Live(), Live()
    at_sum.reduced(local, at_sum.born(dy), plan.y, "M", lives=False)
    at_dx.reduced(local, at_dx.born(x), {axis: plan.x.get(axis) for axis in plan.n}, "M", lives=False)
    normed = local.residual * (1 + (local.arch.logit_scale != 1))
    held = normed + (gathered - whole_dy) * size + before
    forward = held + max(at_loss, at_sum.top * size) - to_come
    backward = held + grad + whole_dy * size + max(dw + x * size, max(reordered, at_dx.top) * size - to_come)
    backward = max(backward, held + local.residual)
    both = max(forward, backward)
    arrived = "head's gradient in main_grad"
    if not plan.w:  # main_grad is there from the first chunk's dW on
        at_dw = backward if rows == local.tokens else both
        return {"head and loss": forward, "gradient of the head": at_dw, arrived: normed}
    made = reducing.reduced(local, reducing.born(w), plan.w, "N") or w
    at_sum_of_dw = normed + reducing.top * local.wgrad_itemsize
    return {
        "head and loss": both,
        "gradient of the head": at_sum_of_dw,
        arrived: normed + made * local.wgrad_itemsize,
    }


def embedding_forward(local: LocalSizes) -> int:
    """Return the bytes of the gathered W, and of the rows before and after their sum."""
    plan, live = local.mode.embed.on(local.mesh), Live()
    features, rows = local.part(local.arch.hidden_size, plan.n), local.part(local.arch.padded_vocab_size, plan.k)
    live.gathered(local, features * rows // local.mesh.size(plan.w), plan.w, "K")
    y = live.born(local.part(local.num_tokens, plan.m) * features)
    live.reduced(local, y, plan.y, "M")
    return live.top * local.itemsize


def embedding_backward(local: LocalSizes) -> int:
    """Return the bytes of the embedding's backward: gathered dY, in fp32 as well, and sums of its rows.

    If no axis reduces the gradient, the rows are added to main_grad; else dW exists in fp32 and in the model's dtype.
    """
    plan, live = local.mode.embed.on(local.mesh), Live()
    features, rows = local.part(local.arch.hidden_size, plan.n), local.part(local.arch.padded_vocab_size, plan.k)
    narrow, tokens = local.narrow, local.part(local.num_tokens, plan.m)
    if plan.w:
        live.reduced(local, features * rows, plan.w, "K")
        gathered_dy = tokens * features * local.itemsize * (bool(plan.dy) + bool(plan.k))
        dw = features * rows
        at_sums = tokens * features * narrow + dw * (local.wide + narrow)
        return local.residual + gathered_dy + max(at_sums, (dw + live.top) * local.itemsize)
    copies = (local.wide if narrow else 0) + local.itemsize * (bool(plan.dy) + bool(plan.k))
    sums = min(tokens, rows) * local.wide if local.kernels.sums_rows else 0
    return local.residual + features * (tokens * copies + sums)
