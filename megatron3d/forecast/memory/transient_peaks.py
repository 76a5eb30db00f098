"""Transient peaks of a rank's memory, on top of what it keeps; they do not coincide.

A gathered operand, and a partial sum before its reduction, are as large as the shard times the number of ranks of the
collective.  Small tensors (a number per token, or per row of scores) are left out.
"""

from __future__ import annotations

from megatron3d.forecast.memory.activations import recomputed_activations
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import kept_by
from megatron3d.model.operations import layer_operations
from megatron3d.parallel.matmul_plan import MatmulPlan


def matmul_backward(local: LocalSizes, site: str) -> int:
    """Return the bytes of dY, of the gathered dY, X and W, of dX and dW before reduction; plus the W being gathered
    for the linear before, and the dW being reduced for the linear after."""
    mesh, matmuls, overlap = local.mesh, local.matmuls, local.overlap
    sites = list(matmuls)
    matmul, place = matmuls[site], sites.index(site)
    plan, before, after = matmul.plan, sites[place - 1], sites[(place + 1) % len(sites)]
    whole_x, whole_w = matmul.x * mesh.size(plan.x), matmul.whole_w
    whole_dy = matmul.y * mesh.size(plan.dy)
    gathered, reordered = _gathered(plan, whole_x, whole_w, whole_dy)
    ahead = matmuls[before].whole_w * (overlap.weight_gather and not overlap.keep_gathered_weights)
    kept = matmul.y + gathered + reordered + whole_x
    if not plan.w:
        return (kept + whole_w) * local.itemsize
    late = matmuls[after].whole_w * overlap.weight_grad
    return (kept + ahead) * local.itemsize + wgrad_bytes(local, whole_w) + late * local.wgrad_itemsize


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


def layer_peaks(local: LocalSizes) -> dict[str, int]:
    """Return the bytes of every peak in a layer, recomputed activations included, freed ones subtracted.

    Where kinds of layers differ, each peak is the largest of all kinds.
    """
    found: dict[str, int] = {}
    for each, _ in local.by_kind(range(local.arch.num_layers)):
        for name, size in _peaks_of_kind(each).items():
            found[name] = max(size, found.get(name, size))
    return found


def _peaks_of_kind(local: LocalSizes) -> dict[str, int]:
    """Return the peaks of a layer: one sweep over its operations from the last to the first.

    When backward reaches an operation, it has freed what those behind it kept; when forward reaches one, these have not
    kept anything yet.
    """
    again, freed, found = recomputed_activations(local), 0, dict[str, int]()
    for operation, kept in reversed(kept_by(layer_operations(local))):
        peaks = {**operation.peaks, **(operation.peaks_again if local.recompute.granularity == "full" else {})}
        if operation.matmul is not None:
            peaks[f"backward of {operation.name}"] = matmul_backward(local, operation.name) + local.residual
        for name, size in peaks.items():
            found[name] = max(found.get(name, 0), size + again - freed)
        freed += sum(stored.num_bytes for stored in kept)
    return found


def head_peaks(local: LocalSizes) -> dict[str, int]:
    """Return the bytes of the last chunk of logits and its gradients, and of the head's dW before its reduction.

    They are the norm's output, and the gathered W and X of the chunk; then the logits in fp32 and their gradient in the
    model's dtype, which a fused loss writes into the logits' memory; after that the gradient, the gathered dY, and dX
    and dW of the chunk unless its GEMM accumulates.  If dW is reduced, its sum has a buffer of its own.
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
    dw = w * size if plan.w or local.kernels.adds_dw else 0
    if plan.w and not before:
        dw = wgrad_bytes(local, w)
    grad = logits * (local.wide if is_fused else size)
    in_gemms = grad + whole_dy * size + max(dw + x * size, reordered * size)
    chunk = local.residual + (gathered - whole_dy) * size + before + max(at_loss, in_gemms)
    return {"head and loss": chunk, "gradient of the head": 2 * local.residual + w * local.wide if plan.w else 0}


def embedding_peak(local: LocalSizes) -> int:
    """Return the bytes of the embedding's backward: gathered dY, in fp32 as well, and sums of its rows.

    If no axis reduces the gradient, the rows are added to main_grad; else dW exists in fp32 and in the model's dtype.
    """
    plan = local.mode.embed.on(local.mesh)
    features, rows = local.part(local.arch.hidden_size, plan.n), local.part(local.arch.padded_vocab_size, plan.k)
    narrow, tokens = local.narrow, local.part(local.num_tokens, plan.m)
    if plan.w:
        gathered_dy = tokens * features * (local.itemsize + narrow)
        return local.residual + gathered_dy + rows * features * (local.wide + narrow)
    copies = (local.wide if narrow else 0) + local.itemsize * (bool(plan.dy) + bool(plan.k))
    sums = min(tokens, rows) * local.wide if local.kernels.sums_rows else 0
    return local.residual + features * (tokens * copies + sums)
