"""Operations of attention: projections, what lies between them and the core, exchanges between context ranks, the core.

    qkv | norms of q and k | all-gather of few key heads | clip | rotary | heads | exchange | core | gate | proj
    down | latents, each with its norm | q_up, kv_up | heads | exchange | core | proj         (latent attention)

What backward holds for a moment on context ranks follows the code of `attention/context/exchanges.py`, line by line:

    part by part    gradients that have arrived | dy of this part | the largest moment of this part
    at the end      gradients of all parts | the same, heads of a position together

Letters: q and kv are the elements of queries, and of keys and values together, that a part attends; e and w are the
bytes of an element in the model's dtype and in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron3d.attention.context.plan import (
    BOTH,
    GATHER,
    HEADS,
    RING,
    Starts,
    exchange_ring,
    exchange_traffic,
    gathered_pairs,
    head_axes,
    key_copies,
)
from megatron3d.attention.plan import (
    DROPOUT_PIECE,
    DROPOUT_ROWS,
    LOGITS_PIECE,
    LONGEST,
    Kind,
    Pair,
    cut,
    latent_traffic,
    logit_pieces,
)
from megatron3d.model.linear_spec import DOWN, GATE, KV_UP, PROJ, Q_UP, QKV
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import (
    INDEX,
    LocalGemm,
    MemoryKernel,
    Operation,
    Scores,
    Stored,
    hash_bytes,
    linear,
    norm,
)
from megatron3d.model.spec import CORE_ATTN
from megatron3d.parallel.matmul_plan import Traffic

CORE = "attention.core"
Heads = dict[str, Stored]  # q, k and v on their way to the core


def attention_operations(local: LocalSizes, x: Stored) -> list[Operation]:
    """Return the operations of attention on x."""
    found, heads = _from_latents(local, x) if local.arch.is_latent else _from_qkv(local, x)
    found += [_largest_logits(local, heads)] if local.records_logits else []
    found += [_layout(local), *_exchange(local, heads), _core(local, heads)]
    if local.arch.attention_output_gate:
        found += _gate_of_latents(local, x, found[-1].output) if local.arch.is_latent else _gate(local, found)
    attended = found[-1].output
    return [*found, linear(local, PROJ, attended, local.residual)]


def _from_qkv(local: LocalSizes, x: Stored) -> tuple[list[Operation], Heads]:
    """Return the operations up to q, k and v of the heads of this rank, which begin as views of qkv's output."""
    arch, width, rows = local.arch, local.arch.kv_channels, local.inner_tokens
    parts = 1 + arch.attention_output_gate
    size = local.inner(parts * local.num_queries * width + 2 * local.keys_width)
    found, heads = [linear(local, QKV, x, size)], Heads()
    for name in ("q", "k", "v"):
        heads[name] = found[0].output
    counts = {"q": local.num_queries, "k": local.num_groups, "v": local.num_groups}

    def passes(operation: Operation, name: str) -> None:
        found.append(operation)
        heads[name] = operation.output

    if arch.qk_layernorm and arch.qk_layernorm_scope != "head":
        for name, features in (("q", local.num_queries * width), ("k", local.keys_width)):
            axes = local.heads.axes
            passes(_head_norm(local, name, heads[name], rows=rows, width=features, axes=axes), name)
    if axes := local.heads.gather_axes:
        for name in ("k", "v"):
            sent, ranks = local.inner(local.keys_width) * (local.mesh.size(axes) - 1), local.mesh.size(axes)
            whole = Stored(CORE, f"{name} gathered", local.inner(local.keys_width) * ranks)
            there, back = Traffic("all_gather", axes, sent), Traffic("reduce_scatter", axes, sent)
            passes(_between(f"{name}_gather", heads[name], whole, sent=(there,), sent_back=(back,)), name)
    for name, count in counts.items() if arch.clip_qkv is not None else ():
        clipped = Stored(CORE, f"{name} clipped", local.inner(count * width))
        kernel = MemoryKernel("activation", rows * count * width)
        passes(_between(f"{name}_clip", heads[name], clipped, saves=(heads[name],), kernels=(kernel,)), name)

    def normalizes() -> None:
        has_norm = arch.qk_layernorm and arch.qk_layernorm_scope == "head"
        for name in ("q", "k") if has_norm or (arch.qk_l2_norm and local.attention.rotary) else ():
            passes(_head_norm(local, name, heads[name], rows=rows * counts[name], width=width, axes=()), name)

    def rotates() -> None:
        rotary = local.attention.rotary
        for name in ("q", "k") if rotary else ():
            rotated = Stored(CORE, f"{name} rotated", local.inner(counts[name] * width))
            kernel = MemoryKernel("rotary", rows * counts[name] * (rotary.num_channels if rotary else 0))
            passes(_between(f"{name}_rotary", heads[name], rotated, kernels=(kernel,)), name)

    for step in (rotates, normalizes) if arch.qk_layernorm_after_rope else (normalizes, rotates):
        step()
    if arch.query_scale != 1 and heads["q"] is found[0].output:  # else the scaled ones take the place of what q became
        passes(_between("q_scale", heads["q"], Stored(CORE, "q scaled", local.inner(counts["q"] * width))), "q")
    if local.attention.temperature:
        kernel = MemoryKernel("activation", rows * counts["q"] * width)
        scaled = Stored(CORE, "q by position", local.inner(counts["q"] * width))
        passes(_between("q_temperature", heads["q"], scaled, kernels=(kernel,)), "q")
    for name in ("k", "v") if not local.heads.are_even else ():
        each = Stored(CORE, f"{name} for each head", local.inner(local.num_queries * width))
        is_gathered = bool(local.mode.context) and local.mode.exchange == GATHER
        # Both are indexed together, or again.
        has_index = not is_gathered or (name == "k" and local.drops_whole_keys)
        index = [Stored(CORE, f"head of each {name}", local.num_queries * INDEX)] if has_index else []
        passes(_between(f"{name}_heads", heads[name], each, saves=index), name)
    return found, heads


def _head_norm(local: LocalSizes, name: str, x: Stored, *, rows: int, width: int, axes: tuple[str, ...]) -> Operation:
    """Return the norm of q or k, over each head or over all of a projection."""
    site = f"attention.{name}_norm"
    made = norm(local, site, x, rows=rows, width=width, axes=axes, module=CORE_ATTN, lacks_weight=local.arch.qk_l2_norm)
    y = Stored(CORE, f"{name} normed", made.output.num_bytes)
    others = local.inner(local.num_queries * local.arch.kv_channels + 2 * local.keys_width) - y.num_bytes
    peaks = {f"backward of {site}": size + others + local.residual for size in made.peaks.values()}
    return replace(made, writes=(y,), peaks=peaks)


def _between(name: str, x: Stored, y: Stored, **more: object) -> Operation:
    """Return an operation between the projections of attention."""
    return Operation(name=f"attention.{name}", reads=(x,), writes=(y,), module=CORE_ATTN, **more)  # type: ignore[arg-type]


def _from_latents(local: LocalSizes, x: Stored) -> tuple[list[Operation], Heads]:
    """Return the operations up to q, k and v, by latents of queries, if they have one, and of keys and values."""
    arch, rows = local.arch, local.tokens
    widths = {Q_UP: arch.q_lora_rank, KV_UP: arch.kv_lora_rank}
    outputs = {Q_UP: arch.key_size, KV_UP: arch.qk_head_dim + arch.value_size}
    down = linear(local, DOWN, x, local.matmuls[DOWN].y * local.itemsize)
    found, up, inputs = [down], dict[str, Operation](), {Q_UP: x}
    axes = local.mesh.nontrivial(local.mode.residual[1])
    for name, path in (("kv", KV_UP), ("q", Q_UP)):
        if (size := widths[path]) is not None:
            site, width = f"attention.{name}_norm", local.part(size, local.mode.residual[1])
            latent = Stored(site, "input", rows * width * local.itemsize)
            normed = norm(local, site, latent, rows=rows, width=width, axes=axes)
            peaks = {f"backward of {site}": size + local.residual for size in normed.peaks.values()}
            copied = Operation(name=f"attention.{name}_latent", reads=(down.output,), writes=(latent,))
            found += [copied, replace(normed, peaks=peaks)]
            inputs[path] = found[-1].output
    for path, size in outputs.items():
        up[path] = linear(local, path, inputs[path], local.inner(local.num_queries * size))
    shared = arch.qk_pos_emb_head_dim
    sizes = local.mode.expand, local.mesh, local.num_tokens, shared, local.itemsize
    positions = Stored(DOWN, "rotary key", local.inner(shared))
    moved = Operation(
        name="attention.rotary_key",
        writes=(positions,),
        sent=latent_traffic(*sizes, backward=False),
        sent_back=latent_traffic(*sizes, backward=True),
    )
    found += [moved, *up.values()]
    counts = {"q": local.num_queries, "k": local.num_groups, "v": local.num_groups}
    heads = {name: Stored(CORE, f"{name} of one size", local.inner(n * arch.kv_channels)) for name, n in counts.items()}
    made = tuple(heads.values())
    if arch.value_size == arch.kv_channels:  # values are a view of their projection
        heads["v"], made = up[KV_UP].output, made[:2]
    share = local.rotated_share * local.inner_tokens * arch.kv_channels
    joined = Operation(
        name="attention.heads",
        reads=(up[Q_UP].output, up[KV_UP].output, positions),
        writes=made,
        module=CORE_ATTN,
        kernels=[MemoryKernel("rotary", share * counts[name]) for name in ("q", "k") if share],
    )
    return [*found, joined], heads


def _largest_logits(local: LocalSizes, heads: Heads) -> Operation:
    """Return the search for each head's largest logit, in pieces of the queries, over keys that were gathered.

    Keys are copied three times for a moment: for each head, in order of the heads, and transposed.
    """
    arch, mode, width = local.arch, local.mode, local.arch.kv_channels
    gathered = local.inner(local.num_groups * width) * (local.mesh.size(mode.context) - 1)
    each = local.sequences * arch.seq_length * local.num_queries * width * local.itemsize
    piece = min(LOGITS_PIECE, local.positions) * arch.seq_length
    logits = local.sequences * local.num_queries * piece * local.itemsize
    positions = [place for chunk in local.order.chunks(arch.seq_length) for place in range(*chunk)]
    window = None if local.window is None or local.window >= arch.seq_length else local.window
    pairs = sum((high - low) * len(keys) for (low, high), keys in logit_pieces(positions, window))
    return Operation(
        name="attention.largest_logits",
        reads=(heads["q"], heads["k"]),
        module=CORE_ATTN,
        gemms=(LocalGemm(pairs / arch.seq_length, arch.seq_length, width, local.sequences * local.num_queries),),
        flops=2 * width * local.sequences * local.num_queries * pairs,
        sent=(Traffic("all_gather", mode.context, gathered),) if gathered else (),
        forward_peaks={"logits of queries": 3 * each + logits + piece * _MASK_BYTES},
    )


def _layout(local: LocalSizes) -> Operation:
    """Return the copies that split, transpose and join q, k, v and the output."""
    heads = (2 * local.num_queries + 2 * local.num_groups) * local.arch.kv_channels
    joined = local.inner(2 * local.num_queries * local.arch.kv_channels + 4 * local.keys_width)
    name = "attention.layout"
    return Operation(
        name=name,
        kernels=(MemoryKernel("layout", local.inner_tokens * heads),),
        peaks={f"backward of {name}": joined + local.residual},  # gradients of q, k, v, and these joined
    )


def _exchange(local: LocalSizes, heads: Heads) -> Iterator[Operation]:
    """Yield the exchange between context ranks, and put what the core attends in the place of q, k and v.

    Recomputation keeps the output of attention, except where its weights have dropout.
    """
    mode = local.mode
    if not mode.context:
        return
    given = mode.exchange, mode.context, local.exchange, local.mesh
    there, back = exchange_traffic(*given, backward=False), exchange_traffic(*given, backward=True)
    again = exchange_traffic(*given, backward=False, again=local.keeps_result).calls
    reads = tuple(heads.values())
    received = [Stored(CORE, what, size) for what, size in kept_by_exchange(local).items()]
    mine = {"q": heads["q"]} if keeps_queries(local) else {}
    heads.clear()
    heads.update(mine | {stored.what: stored for stored in received})
    yield Operation(
        name="attention.exchange",
        reads=reads,
        writes=received,
        module=CORE_ATTN,
        sent=there.calls,
        sent_back=back.calls,
        sent_in_module=again,
        hidden=_without(there.calls, there.exposed),
        hidden_back=_without(back.calls, back.exposed),
        behind=(CORE,),
    )


def _without(calls: Sequence[Traffic], exposed: Sequence[Traffic]) -> list[Traffic]:
    rest = list(calls)
    for call in exposed:
        rest.remove(call)
    return rest


def kept_by_exchange(local: LocalSizes) -> Mapping[str, int]:
    """Return the bytes of what attention keeps in the place of its keys and values; with heads, of queries as well.

    Of an all-gather these are the keys and values of all ranks; with dropout each head's are apart where groups are
    uneven.  Where ranks exchange heads, those of keys and values may be copied.
    """
    if local.mode.exchange == GATHER:
        is_apart = local.drops_whole_keys and not local.heads.are_even
        heads = local.num_queries / local.num_groups if is_apart else 1
        return {"keys and values gathered": round(local.whole_keys * heads) * local.itemsize}
    sizes, ranks = local.exchange, local.mesh.size(head_axes(local.mode.exchange, local.mode.context))
    keys = round(2 * sizes.keys * key_copies(sizes.num_groups, ranks)) * local.itemsize
    queries = round(sizes.queries) * local.itemsize
    if keeps_queries(local):
        return {"keys and values": keys}
    return {"queries received": queries, "keys and values": keys, "output of these heads": queries}


def keeps_queries(local: LocalSizes) -> bool:
    """Return whether attention keeps the queries of this rank's positions, and not those of some heads."""
    return not head_axes(local.mode.exchange, local.mode.context)


def _core(local: LocalSizes, heads: Heads) -> Operation:
    """Return attention from q, k and v to its output, fused or, with dropout, materialized."""
    arch, kv = local.arch, local.arch.kv_channels
    saves = list(_materialized(local, heads) if local.drops_whole_keys else _fused(local, heads))
    attended = _attended(local)
    output = next(_uncut(local), attended)
    result = [Stored(CORE, "logsumexp", local.inner_tokens * local.num_queries * local.wide), output]
    is_plain = arch.attention_softcap is not None
    scores = Scores(
        local.sequences * local.num_queries,
        local.positions,
        local.keys_seen if is_plain else arch.seq_length,
        kv,
        local.seen_share,
        is_plain,
    )
    flops = 4 * kv * local.scores(backward=False)
    # Recomputation stops before the last GEMM, whose operands are saved.
    is_whole = local.drops_whole_keys and arch.seq_length <= DROPOUT_ROWS
    peaks = {f"backward of {CORE}": _attention_backward(local) + local.residual}
    return Operation(
        name=CORE,
        reads=tuple(heads.values()),
        writes=(attended,),
        saves=saves,
        module=CORE_ATTN,
        params=("attention.sinks",),
        result=result if local.keeps_result else None,
        scores=scores,
        flops=flops,
        flops_in_module=flops // 2 if is_whole and (arch.is_latent or not arch.attention_output_gate) else None,
        backward_flops=8 * kv * local.scores(backward=True),
        peaks=peaks,
        forward_peaks=_dropout_peak(local),
    )


def _uncut(local: LocalSizes) -> Iterator[Stored]:
    """Yield attention's output where its heads are larger than those of the output projection's input."""
    if local.arch.value_size < local.arch.kv_channels:
        width = local.num_queries * local.arch.kv_channels
        yield Stored(CORE, "output before its cut", local.inner(width))


def _attended(local: LocalSizes) -> Stored:
    """Return attention's output: the input of its gate, or of the output projection."""
    if local.arch.attention_output_gate:
        return Stored(CORE, "output before its gate", local.inner(local.num_queries * local.arch.value_size))
    return Stored(PROJ, "input", local.inner(local.num_queries * local.arch.value_size))


def _gate(local: LocalSizes, before: Sequence[Operation]) -> list[Operation]:
    """Return the gate of the output, which keeps both factors and the projections with the gate."""
    return [_gating(local, before[0].output, before[-1].output, (before[0].output,), CORE_ATTN)]


def _gate_of_latents(local: LocalSizes, x: Stored, attended: Stored) -> list[Operation]:
    """Return the projection of the gate, and the gate, which keeps both factors and is not recomputed."""
    gate = linear(local, GATE, x, local.inner(local.num_queries * local.arch.value_size))
    return [gate, _gating(local, gate.output, attended, (), None)]


def _gating(
    local: LocalSizes, gate: Stored, attended: Stored, also_saved: tuple[Stored, ...], module: str | None
) -> Operation:
    width = local.num_queries * local.arch.value_size
    return Operation(
        name="attention.gate",
        reads=(gate, attended),
        writes=(Stored(PROJ, "input", local.inner(width)),),
        saves=(*also_saved, attended, Stored(CORE, "sigmoid of the gate", local.inner(width))),
        module=module,
        kernels=(MemoryKernel("activation", 1.5 * local.inner_tokens * width),),
    )


def _fused(local: LocalSizes, heads: Heads) -> Iterator[Stored]:
    """Yield what fused attention keeps: q, k, v, a number per row of scores, and its output unless ranks send it."""
    yield from heads.values()
    is_packed = _is_packed(local) or bool(local.mode.context)
    if local.itemsize == 2 and local.arch.seq_length <= local.kernels.softmax_again and not is_packed:
        return
    yield Stored(CORE, "logsumexp", local.inner_tokens * local.num_queries * local.wide)
    if local.arch.softmax_type == "off-by-one":
        yield Stored(CORE, "sinks of 0", local.num_queries * local.itemsize)
    if not local.mode.context or keeps_queries(local):
        yield next(_uncut(local), _attended(local))


def _is_packed(local: LocalSizes) -> bool:
    """Return whether attention is computed by pairs of query and key rows (`attention/packed.py`)."""
    return local.masks_documents or local.window is not None or not local.arch.has_vanilla_softmax


def _materialized(local: LocalSizes, heads: Heads) -> Iterator[Stored]:
    """Yield copies of q, k and v by head, the scores after softmax, the mask and its result: [heads, S, S] each.

    Of longer sequences than `DROPOUT_ROWS` only q, k and v are kept.
    """
    seq = local.arch.seq_length
    if seq > DROPOUT_ROWS:
        yield from heads.values()
        return
    scores = local.inner_tokens * local.num_queries * seq
    by_head = local.inner(local.num_queries * local.arch.kv_channels)
    is_copied = local.sequences > 1 and local.num_queries > 1
    yield Stored(CORE, "q by head", by_head) if is_copied else heads["q"]
    yield Stored(CORE, "k and v by head", 2 * by_head * local.mesh.size(local.mode.context))
    masks = local.sequences if local.masks_documents else 1
    yield Stored(CORE, "positions not seen", masks * local.positions * seq)
    sinks = 0 if local.arch.softmax_type == "vanilla" else local.inner_tokens * local.num_queries
    yield Stored(CORE, "softmax", (scores + sinks) * local.wide)
    if local.arch.attention_softcap is not None:
        yield Stored(CORE, "tanh of scores", scores * local.wide)
    yield Stored(CORE, "dropout mask", scores)
    yield Stored(CORE, "softmax after dropout", scores * local.itemsize)


def _dropout_peak(local: LocalSizes) -> dict[str, int]:
    """Return the bytes while the mask of dropout on attention's weights is made, of pieces of longer sequences."""
    if not local.drops_whole_keys:
        return {}
    is_whole = local.arch.seq_length <= DROPOUT_ROWS
    rows = local.inner_tokens if is_whole else local.sequences * DROPOUT_PIECE
    scores = rows * local.num_queries * local.arch.seq_length
    to_come = 0 if local.itemsize < local.wide or not is_whole else local.itemsize
    size = hash_bytes(scores) + (local.wide - to_come) * scores
    if not is_whole:  # the piece's scores, weights and masks, which are not kept
        size += scores * (local.wide + local.itemsize + 2)
    size += local.inner(local.num_queries * local.arch.kv_channels + 2 * local.keys_width)
    return {"hash of attention's dropout mask": size}


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
    # Of parts before, gradients of whole sequences' keys are in flight.
    before, whole = e * (count - 1) * (q + kv + kv // ranks), e * count * (q + kv // ranks)
    return max(before + max(moments), (1 + (count > 1)) * whole)


def _heads(local: LocalSizes, starts: Starts) -> int:
    """Return the peak of an exchange of heads, with or without a ring: gradients are sent home in blocks."""
    part, e = _part(local), local.itemsize
    q, kv = part.q(local), part.kv(local)
    in_part = q * e + max(_ring_moment(local, starts, part), 3 * e * (q + kv))
    copies = key_copies(local.exchange.num_groups, local.mesh.size(head_axes(local.mode.exchange, local.mode.context)))
    summed = round(2 * local.exchange.keys) if copies > 1 else 0
    before = 2 * (part.num_parts - 1) * (q + kv)  # sent and received
    return e * max(before + in_part // e, 2 * part.num_parts * (q + kv) + summed)


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
        work += 2 * size * at_once * part.heads * local.itemsize * (part.heads > part.groups)
    return max(grads + mask + work, _MASK_BYTES * rows * keys * is_masked)


_PEAKS: Mapping[str, Callable[[LocalSizes, Starts], int]] = {
    GATHER: _gathered_peak,
    RING: lambda local, starts: _ring_moment(local, starts, _part(local)),  # its heads are not in parts
    HEADS: _heads,
    BOTH: _heads,
}


# Rows of a block of fused attention.
_SDPA_ROWS = 128


def _attention_backward(local: LocalSizes) -> int:
    """Return the bytes of the gradients of attention's output and operands, and of what computes them.

    They are over when rotary embeddings and qkv's output have their gradients (`_layout`).
    """
    groups = local.num_groups if local.heads.are_even else local.num_queries
    of_operands = local.inner((local.num_queries + 2 * groups) * local.arch.kv_channels)
    # On a CPU those of a pair of rows are added to those of all.
    of_pair = of_operands * (_is_packed(local) and not local.kernels.on_gpu and not local.drops_whole_keys)
    grads = local.inner(local.num_queries * local.arch.kv_channels) + of_operands + of_pair
    if local.mode.context and not local.drops_whole_keys:
        return exchange_peak(local)
    narrow_window = local.window is not None and local.itemsize < local.wide and not local.kernels.on_gpu
    in_fp32 = local.inner(2 * local.keys_width) // local.itemsize * local.wide if narrow_window else 0
    gathered = local.whole_keys * (local.wide + 2 * local.itemsize)  # with dropout: summed, in order, and by rank
    return grads + sdpa_workspace(local) + _capped_scores(local) + in_fp32 + gathered


def _capped_scores(local: LocalSizes) -> int:
    """Return the bytes of the scores that backward has at once, six times in fp32 or wider, where they are capped or
    have dropout: those of a piece of the queries, with the keys that they may see."""
    is_plain = local.arch.attention_softcap is not None or local.arch.attention_dropout
    if not is_plain or local.drops_whole_keys:
        return 0
    seq, rows = local.arch.seq_length, min(local.positions, local.longest_piece or LONGEST)
    keys = seq if local.window is None else min(seq, rows + local.window)
    by_head = local.sequences * local.num_queries * rows
    shares_keys = local.num_queries > local.num_groups and local.heads.are_even
    # Of queries with the same keys the rows of q and dY are copied together.
    copied = 2 * shares_keys * local.arch.kv_channels * local.itemsize
    return by_head * (6 * keys * local.wide + copied)


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
