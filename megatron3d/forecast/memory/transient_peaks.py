"""Transient peaks of a rank's memory, on top of what it keeps; they do not coincide.

A gathered operand, and a partial sum before its reduction, are as large as the shard times the number of ranks of the
collective.  Small tensors (a number per token, or per row of scores) are left out.  The backward of attention on
context ranks follows the code of `attention/context/exchanges.py`, line by line:

    part by part    gradients that have arrived | dy of this part | the largest moment of this part
    at the end      gradients of all parts | the same, heads of a position together

Letters: q and kv are the elements of queries, and of keys and values together, that a part attends; e and w are the
bytes of an element in the model's dtype and in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron3d.attention.context.plan import (
    BOTH,
    GATHER,
    HEADS,
    RING,
    Starts,
    exchange_ring,
    gathered_pairs,
    head_axes,
    key_copies,
)
from megatron3d.attention.plan import DROPOUT_PIECE, DROPOUT_ROWS, LONGEST, Kind, Pair, cut
from megatron3d.forecast.memory.activations import BACKWARD as EXPERTS_BACKWARD
from megatron3d.forecast.memory.activations import (
    COMBINE,
    SHARED_ACTIVATION,
    combination_peak,
    expert_peaks,
    layer_activations,
    recomputed_activations,
)
from megatron3d.forecast.memory.local_sizes import LocalSizes
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.linear_spec import DOWN, FC1, FC2, KV_UP, PROJ, Q_UP, QKV
from megatron3d.model.spec import NO_RECOMPUTE
from megatron3d.ops.plan import token_moves
from megatron3d.parallel.matmul_plan import MatmulPlan

# Bytes of a mask while it is made: distances in int64, and what is compared.
_MASK_BYTES = 8 + 3


class _Part(NamedTuple):
    """Heads that a rank attends at once, and how many parts there are.

    Attributes:
        heads: query heads; groups: key/value heads.
    """

    heads: int
    groups: int
    positions: int
    num_parts: int

    def q(self, local: LocalSizes) -> int:
        """Return the elements of its queries."""
        return local.sequences * self.positions * self.heads * local.arch.kv_channels

    def kv(self, local: LocalSizes) -> int:
        """Return the elements of its keys and values at as many positions as queries."""
        return 2 * local.sequences * self.positions * self.groups * local.arch.kv_channels


def exchange_peak(local: LocalSizes, starts: Starts = None) -> int:
    """Return the most bytes that attention's backward has at once on context ranks, beyond what forward kept.

    The gradient of its output is counted, and so are those that it returns.

    Args:
        starts: first positions of the documents of each sequence; None: one document.
    """
    return round(local.exchange.queries) * local.itemsize + _PEAKS[local.mode.exchange](local, starts)


def _gathered_peak(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of an all-gather: gradients of whole sequences' keys, and again in the order of ranks."""
    count, ranks = local.exchange.num_parts(GATHER, 1), local.mesh.size(local.mode.context)
    part = _Part(-(-local.num_queries // count), local.num_groups // count, local.positions, count)
    apart = part if local.heads.are_even else part._replace(groups=part.heads)
    e, w, q, kv = local.itemsize, local.wide, part.q(local), ranks * part.kv(local)
    copied = 0 if apart is part else ranks * apart.kv(local)
    pairs = gathered_pairs(local.order, local.arch.seq_length, starts, local.window)
    own = apart.kv(local) * (w + e * (len(pairs.chunks) > 1)) if pairs.own else 0
    moments = [
        w * (q + (copied or kv))
        + e * copied
        + max(own + _largest(local, pairs.own, apart), _largest(local, pairs.others, apart)),
        w * (q + kv + copied) + e * copied,
        (w + local.narrow) * (q + kv),
        e * (q + 2 * kv + kv // ranks),
    ]
    before, whole = e * (count - 1) * (q + kv // ranks), e * count * (q + kv // ranks)
    return max(before + max(moments), (1 + (count > 1)) * whole)


def _heads(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of an exchange of heads, with or without a ring: gradients are sent home in blocks."""
    part, e = _part(local), local.itemsize
    q, kv = part.q(local), part.kv(local)
    in_part = q * e + max(_ring_moment(local, starts, part), 3 * e * (q + kv))
    copies = key_copies(local.exchange.num_groups, local.mesh.size(head_axes(local.mode.exchange, local.mode.context)))
    summed = round(2 * local.exchange.keys) if copies > 1 else 0
    return e * max((part.num_parts - 1) * (q + kv) + in_part // e, 2 * part.num_parts * (q + kv) + summed)


def _part(local: LocalSizes) -> _Part:
    """Return a part of the heads that a rank has for the positions of all ranks of `a2a`."""
    sizes, ranks = local.exchange, local.mesh.size(head_axes(local.mode.exchange, local.mode.context))
    count, groups = sizes.num_parts(local.mode.exchange, ranks), sizes.num_groups * key_copies(sizes.num_groups, ranks)
    return _Part(local.num_queries // ranks // count, groups // ranks // count, local.positions * ranks, count)


def _ring_moment(local: LocalSizes, starts: Starts, part: _Part) -> int:
    """Return the largest moment of a ring of one rank or more.

    It has gradients of its own keys; from the second step on those of a block, those which it sends and those which it
    receives; and the keys and values of a step and of the next one.
    """
    plan = exchange_ring(local.mode.exchange, local.order, local.arch.seq_length, starts, local.window)
    if local.arch.attention_dropout and local.longest_piece:
        plan = plan.in_pieces(local.longest_piece)
    q, kv, e, w = part.q(local), part.kv(local), local.itemsize, local.wide
    last = len(plan.steps) - 1
    first, second = plan.own_parts
    moments = [w * (q + kv) + e * kv * (last >= 0) + _largest(local, first, part)]
    for place, step in enumerate(plan.steps):
        blocks, before = e * (1 + (place < last)) * kv, 2 * bool(place)
        moments.append(w * (q + (2 + before) * kv) + blocks + _largest(local, step.pairs, part))
        moments.append(w * (q + 3 * kv) + blocks)  # sent
    moments.append(w * (q + (3 if plan.steps else 1) * kv) + _largest(local, second, part))
    return max(*moments, (w + local.narrow) * (q + kv))


def _largest(local: LocalSizes, pairs: Iterable[Pair], part: _Part) -> int:
    """Return the bytes of the pair that needs most: its gradients, its mask, and what its kernel works with."""
    has_scores = bool(local.arch.attention_dropout) or local.arch.attention_softcap is not None
    is_plain = has_scores or (local.kernels.on_gpu and local.itemsize == local.wide)
    if local.kernels.on_gpu and not is_plain:
        return max((_fused_pair(local, pair, part) for pair in pairs), default=0)
    pieces = (piece for pair in pairs for piece in (cut(pair, local.window) if pair.kind is Kind.MASKED else (pair,)))
    return max((_pair(local, piece, part, is_plain) for piece in pieces), default=0)


def _fused_pair(local: LocalSizes, pair: Pair, part: _Part) -> int:
    """Return the bytes of a pair of flash attention on a GPU, which needs no mask; dQ is summed in fp32."""
    rows, keys, size = _sizes(local, pair)
    grads = size * (rows * part.heads + 2 * keys * part.groups) * local.itemsize
    by_head = 2 * keys * part.heads * local.itemsize * (part.groups != part.heads)
    return grads + size * rows * part.heads * local.wide + size * by_head


def _sizes(local: LocalSizes, pair: Pair) -> tuple[int, int, int]:
    """Return the rows of queries and of keys, and the features of one head for each of them, of all sequences."""
    sequences = local.sequences if pair.sequences is None else pair.sequences[1] - pair.sequences[0]
    size = sequences * local.arch.kv_channels
    return pair.queries[1] - pair.queries[0], pair.keys[1] - pair.keys[0], size


def _pair(local: LocalSizes, pair: Pair, part: _Part, is_plain: bool) -> int:
    rows, keys, size = _sizes(local, pair)
    grads = size * (rows * part.heads + 2 * keys * part.groups) * local.itemsize
    is_masked = pair.kind is Kind.MASKED
    mask = rows * keys * (1 + local.itemsize * (not is_plain)) * is_masked
    work = 0
    if is_plain:
        at_once = min(rows, LONGEST)
        kept = 5 if local.arch.attention_softcap is not None else 4  # in fp32; the other two have the model's dtype
        scores = size // local.arch.kv_channels * part.heads * at_once * keys
        work = scores * (kept * local.wide + (6 - kept) * local.itemsize)
        work += 2 * size * keys * part.groups * local.wide * (at_once < rows)
    return max(grads + mask + work, _MASK_BYTES * rows * keys * is_masked)


_PEAKS: Mapping[str, Callable[[LocalSizes, Starts], int]] = {
    GATHER: _gathered_peak,
    RING: lambda local, starts: _ring_moment(local, starts, _part(local)),  # its heads are not in parts
    HEADS: _heads,
    BOTH: _heads,
}


# `ops/dropout.py` hashes indices in int64, in chunks of at most this many elements; two numbers are live per element.
_HASH_BYTES, HASH_CHUNK = 16, 2**16
# A norm that is not one kernel casts to fp32: input, gradient, their products and sums.
_NORM_COPIES = 6
# Rows of a block of fused attention.
_SDPA_ROWS = 128


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


# Modules of a layer in the order of backward.  When backward reaches one, it has freed what those before it in this
# order kept; when forward reaches one, these have not kept anything yet.
_BACKWARD = (
    "mlp_dropout",
    "mlp_output_norm",
    FC2,
    "mlp.activation",
    FC1,
    *EXPERTS_BACKWARD,
    "post_attention_norm",
    "attention_dropout",
    "attention_output_norm",
    PROJ,
    "attention.core",
    QKV,
    KV_UP,
    Q_UP,
    "attention.kv_norm",
    "attention.q_norm",
    DOWN,
)


def layer_peaks(local: LocalSizes) -> dict[str, int]:
    """Return the bytes of every peak in a layer, recomputed activations included, freed ones subtracted.

    Where kinds of layers differ, each peak is the largest of all kinds.
    """
    found: dict[str, int] = {}
    for each, _ in local.by_kind(range(local.arch.num_layers)):
        found |= {name: max(size, found.get(name, size)) for name, size in _peaks_of_kind(each).items()}
    return found


def _peaks_of_kind(local: LocalSizes) -> dict[str, int]:
    items = layer_activations(replace(local, recompute=NO_RECOMPUTE))
    kept = {site: sum(item.num_bytes for item in items if item.site == site) for site in _BACKWARD}
    again = recomputed_activations(local)
    inside = {site: matmul_backward(local, site) for site in reversed(list(local.matmuls))}
    inside["attention.core"] = _attention_backward(local)
    inside["mlp.activation" if local.experts is None else SHARED_ACTIVATION] = local.inner(
        (3 if local.is_gated else 2) * local.ffn
    )
    if local.experts is not None:
        inside |= expert_peaks(local, local.experts)
    needed = {f"backward of {site}": (site, size + local.residual) for site, size in inside.items()}
    if local.experts is not None:
        needed["sum of experts' outputs"] = COMBINE, combination_peak(local, local.experts)
    if local.arch.hidden_dropout:
        needed["hash of a dropout mask"] = "mlp_dropout", _hash_bytes(local.tokens * local.hidden)
    if local.drops_whole_keys:
        is_whole = local.arch.seq_length <= DROPOUT_ROWS
        rows = local.inner_tokens if is_whole else local.sequences * DROPOUT_PIECE
        scores = rows * local.num_queries * local.arch.seq_length
        to_come = 0 if local.itemsize < local.wide or not is_whole else local.itemsize
        size = _hash_bytes(scores) + (local.wide - to_come) * scores
        if not is_whole:  # the piece's scores, weights and masks, which are not kept
            size += scores * (local.wide + local.itemsize + 2)
        size += local.inner(local.num_queries * local.arch.kv_channels + 2 * local.keys_width)
        needed["hash of attention's dropout mask"] = "attention.core", size
    composed = local.arch.is_rms_norm and not local.kernels.fused_rms_norm
    if local.splits_features or composed:
        needed["norm in fp32"] = local.arch.norm_sites[-1], _NORM_COPIES * local.tokens * local.hidden * local.wide
    gone = {at: sum(kept[site] for site in _BACKWARD[:place]) for place, at in enumerate(_BACKWARD)}
    return {name: size + again - gone[at] for name, (at, size) in needed.items()}


def _attention_backward(local: LocalSizes) -> int:
    """Return the bytes of the gradients of attention's output and operands, of qkv, and of what computes them.

    On context ranks the exchange is over when rotary embeddings and qkv's output have their gradients.
    """
    projected = local.inner(3 * local.num_queries * local.arch.kv_channels + 4 * local.keys_width)
    if local.mode.context and not local.drops_whole_keys:
        return max(projected, exchange_peak(local))
    narrow_window = local.window is not None and local.itemsize < local.wide and not local.kernels.on_gpu
    in_fp32 = local.inner(2 * local.keys_width) // local.itemsize * local.wide if narrow_window else 0
    gathered = local.whole_keys * (local.wide + 2 * local.itemsize)  # with dropout: summed, in order, and by rank
    return projected + sdpa_workspace(local) + capped_scores(local) + in_fp32 + gathered


def capped_scores(local: LocalSizes) -> int:
    """Return the bytes of the scores that backward has at once, six times in fp32 or wider, where they are capped or
    have dropout: those of a piece of the queries, with the keys that they may see."""
    is_plain = local.arch.attention_softcap is not None or local.arch.attention_dropout
    if not is_plain or local.drops_whole_keys:
        return 0
    seq, rows = local.arch.seq_length, min(local.positions, local.longest_piece or LONGEST)
    keys = seq if local.window is None else min(seq, rows + local.window)
    return 6 * local.sequences * local.num_queries * rows * keys * local.wide


def sdpa_workspace(local: LocalSizes) -> int:
    """Return the bytes that the backward of fused attention needs on a GPU beyond the gradients of q, k and v.

    dQ is summed in fp32, with a number per row; where query heads share keys, each has a dK and dV of its own, to be
    added.  Rows are padded to 128, and heads to 32 features (64 above 128).  These are FlashAttention's (Dao 2023,
    arXiv:2307.08691); cuDNN's are as large.
    """
    is_fused = not local.arch.attention_dropout and local.arch.attention_softcap is None
    if not local.kernels.sdpa_workspace or not is_fused or local.itemsize == local.wide:
        return 0
    seq, width = local.positions, local.arch.kv_channels
    rows = local.sequences * _padded(seq, _SDPA_ROWS) * local.num_queries
    sums = rows * (_padded(width, 32 if width <= 128 else 64) + 1) * local.wide
    is_grouped = local.num_groups != local.num_queries and local.heads.are_even
    return sums + (2 * local.inner(local.num_queries * width) if is_grouped else 0)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _hash_bytes(numel: int) -> int:
    return _HASH_BYTES * min(numel, HASH_CHUNK)


def head_peaks(step: StepSpec) -> dict[str, int]:
    """Return the bytes of the last chunk of logits and its gradients, and of the head's dW before its reduction.

    They are the norm's output, and the gathered W and X of the chunk; then the logits in fp32 and their gradient in the
    model's dtype, which a fused loss writes into the logits' memory; after that the gradient, the gathered dY, and dX
    and dW of the chunk unless its GEMM accumulates.  If dW is reduced, its sum has a buffer of its own.
    """
    local, size = step.local, step.local.itemsize
    plan, is_fused = local.mode.expand.on(local.mesh), local.kernels.fused_loss
    rows, ranks = chunk_rows(step)
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


def chunk_rows(step: StepSpec) -> tuple[int, int]:
    """Return the rows of this rank in a chunk of `ops/cross_entropy.py`, and the ranks whose rows are gathered."""
    local = step.local
    plan = local.mode.expand.on(local.mesh)
    token_bytes = local.part(local.arch.padded_vocab_size, plan.n) * local.wide
    rows = step.loss_chunk.rows(local.tokens, token_bytes, plan, local.mesh)
    return min(rows, local.tokens), local.mesh.size(token_moves(plan)[0])


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
