"""Activations that a rank keeps from forward to backward of a microbatch, each storage once.

    layer     norm | qkv | rotary, attention | proj | dropout | norm | fc1 | activation | fc2 | dropout
    experts   router's input and choice | rows of fc1 | activation | input of fc2 | rows that slots are added of
    mtp       embedding | two norms and linears | layer | norm, LM head        (a module of multi-token prediction)

Shards are kept, never gathered operands (`linear/matmul.py`), so each size follows from a stream's layout.
A view of a kept tensor, such as v in qkv's output, needs no further memory.  Compare Korthikanti et al. 2022
(arXiv:2205.05198, section 4); docs/memory.md has both side by side.  The load of experts is balanced or a multiple of
that; small tensors (a number or a weight per token and expert) count roughly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatron3d.attention.context.plan import GATHER, head_axes, key_copies
from megatron3d.attention.plan import DROPOUT_ROWS
from megatron3d.experts.plan import SEQUENCE, Experts, capacity_of
from megatron3d.forecast.memory.local_sizes import KeptTensor, LocalMatmul, LocalSizes, activation_tensors
from megatron3d.model.linear_spec import DOWN, FC1, KV_UP, MTP_LINEARS, PROJ, Q_UP, QKV, SHARED_FC1, SHARED_FC2
from megatron3d.model.spec import CORE_ATTN, MLA_UP_PROJ, MLP_ACT, NO_RECOMPUTE, LayerRun, layer_counts, rotaries
from megatron3d.model.stage_plan import Stage
from megatron3d.parallel.modes.mode import ALLGATHER


def latent_path(local: LocalSizes, name: str, count: int) -> Iterator[KeptTensor]:
    """Yield q, k or v as attention sees it: values of full size are a view of their projection."""
    if name == "v" and local.arch.value_size == local.arch.kv_channels:
        yield _kv_up_output(local)
    else:
        yield KeptTensor("attention.core", f"{name} of one size", local.inner(count * local.arch.kv_channels))


def uncut_output(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield attention's output where its heads are larger than those of the output projection's input."""
    if local.arch.value_size < local.arch.kv_channels:
        width = local.num_queries * local.arch.kv_channels
        yield KeptTensor("attention.core", "output before its cut", local.inner(width))


def _kv_up_output(local: LocalSizes) -> KeptTensor:
    width = local.arch.qk_head_dim + local.arch.value_size
    return KeptTensor(KV_UP, "output", local.inner(local.num_queries * width))


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


# Bytes of an index.
INDEX = 8
ROUTER, EXPERT_FC1, ACTIVATION, EXPERT_FC2, COMBINE = (
    f"mlp.{name}" for name in ("router", "experts.fc1", "experts.activation", "experts.fc2", "experts.combine")
)
SHARED_ACTIVATION = SHARED_FC1.removesuffix("fc1") + "activation"
# Sites in the order of backward.
BACKWARD = (COMBINE, EXPERT_FC2, ACTIVATION, EXPERT_FC1, SHARED_FC2, SHARED_ACTIVATION, SHARED_FC1, ROUTER)


def expert_tensors(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield what a mixture of experts keeps for backward, the norm's output included."""
    rows, hidden = local.expert_rows, local.arch.hidden_size
    moves = bool(local.mesh.nontrivial((*local.mode.residual[1], *local.mode.copies)))
    home = local.home_tokens * hidden
    if experts.shared_ffn_hidden_size or not moves:
        yield KeptTensor(ROUTER, "input of the layer", local.residual)
    if moves:
        yield KeptTensor(ROUTER, "whole rows", home * local.itemsize)
    yield from _choice(local, experts)
    yield KeptTensor(EXPERT_FC1, "rows", rows * hidden * local.itemsize)
    inner = rows * local.expert_ffn * local.itemsize
    yield KeptTensor(EXPERT_FC1, "output", (2 if local.is_gated else 1) * inner)
    yield KeptTensor(ACTIVATION, "weights of rows", rows * local.wide)
    if not local.recompute.recomputes(MLP_ACT):
        yield KeptTensor(EXPERT_FC2, "input", inner)
    if experts.shared_ffn_hidden_size:
        yield from activation_tensors(local, local.inner(local.ffn), (SHARED_FC1, SHARED_FC2))
    if experts.has_shared_gate:
        yield KeptTensor(COMBINE, "output of shared experts", home * local.itemsize)


def _choice(local: LocalSizes, experts: Experts) -> Iterator[KeptTensor]:
    """Yield the choice of experts, the order of rows, and what the losses of the router keep."""
    balance, scores = local.arch.balance, local.home_tokens * experts.num_experts * local.wide
    slots, ranks = local.gathered_tokens * experts.topk, local.mesh.size(local.mode.experts)
    yield KeptTensor(ROUTER, "choice", slots * INDEX)
    if local.mode.dispatcher == ALLGATHER and ranks > 1:
        yield KeptTensor(ROUTER, "order of rows", local.expert_rows * INDEX)
    else:
        reordered = ranks > 1 and experts.num_experts > ranks
        yield KeptTensor(ROUTER, "order of rows", slots * INDEX + 2 * reordered * local.expert_rows * INDEX)
    yield KeptTensor(ROUTER, "weights", slots * local.wide)
    if experts.score_function != "softmax" or experts.pre_softmax:
        yield KeptTensor(ROUTER, "scores", scores)
    if balance is not None and balance.losses:
        yield KeptTensor(ROUTER, "scores of the balance loss", (3 if SEQUENCE in balance.losses else 2) * scores)
    if balance is not None and balance.z_coeff:
        yield KeptTensor(ROUTER, "logits", scores)


def expert_peaks(local: LocalSizes, experts: Experts) -> Mapping[str, int]:
    """Return the transient bytes of each site of the backward: gradients of rows, and copies in another order."""
    row, inner = local.expert_rows * local.arch.hidden_size, local.expert_rows * local.expert_ffn
    ranks, parts = local.mesh.size(local.mode.experts), 2 if local.is_gated else 1
    one = local.arch.hidden_size * parts * local.expert_ffn * (local.itemsize < local.wide)
    gathered = local.gathered_tokens * local.arch.hidden_size * (ranks if _gathers(local) else local.etensor_ranks > 1)
    combined = (1 + _exchanges(local)) * max(row, rows_combined(local, experts) * local.arch.hidden_size)
    return {
        COMBINE: (gathered + combined) * local.itemsize,
        EXPERT_FC2: (row + inner + one) * local.itemsize,
        ACTIVATION: (5 if local.is_gated else 3) * inner * local.itemsize,
        EXPERT_FC1: (row + parts * inner + one) * local.itemsize,
        ROUTER: row * local.itemsize + _sum_bytes(local, experts),
    }


def combination_peak(local: LocalSizes, experts: Experts) -> int:
    """Return the transient bytes of the forward's end: the layer's input, the sum of rows, these, and before a return.

    A forward that is recomputed follows the all-gather of its output's gradient.
    """
    is_gathered = _gathers(local) or local.etensor_ranks > 1
    again = _tokens_summed(local) * (local.recompute.granularity == "full" and is_gathered)
    rows = again + rows_combined(local, experts) + _exchanges(local) * local.expert_rows
    return local.residual + _sum_bytes(local, experts) + rows * local.arch.hidden_size * local.itemsize


def rows_combined(local: LocalSizes, experts: Experts) -> int:
    """Return the rows that this rank adds: those of its experts, or those that return to its tokens."""
    return local.expert_rows if _gathers(local) else local.gathered_tokens * experts.topk


def worst_load(local: LocalSizes, experts: Experts) -> float:
    """Return the largest load of a rank: each token of its group chooses as many of its experts as it can.

    With a capacity its experts take no more than that of each sequence which the group has tokens of.
    """
    ranks, balance = local.mesh.size(local.mode.experts), local.arch.balance
    num_local = experts.num_experts // ranks
    worst = ranks * min(experts.topk, num_local) / experts.topk
    if balance is None or balance.capacity_factor is None:
        return worst
    group = {*local.mode.experts, *local.mode.etensor, *local.mode.batch_axes}
    parts = local.mesh.size(local.mesh.nontrivial(axis for axis in local.mode.home if axis not in group))
    taken = num_local * capacity_of(balance.capacity_factor, local.arch.seq_length, experts)
    return min(worst, ranks * parts * taken / (local.arch.seq_length * experts.topk))


def expected_load(local: LocalSizes, imbalance: float) -> float:
    """Return the load of the busiest rank that predictions assume: `imbalance`, or the largest that there can be."""
    return 1.0 if local.arch.experts is None else min(imbalance, worst_load(local, local.arch.experts))


def _gathers(local: LocalSizes) -> bool:
    """Return whether a rank has the tokens of all ranks of its expert group."""
    return local.mode.dispatcher == ALLGATHER and local.mesh.size(local.mode.experts) > 1


def _exchanges(local: LocalSizes) -> bool:
    """Return whether rows go to the ranks of their experts and return."""
    return local.mesh.size(local.mode.experts) > 1 and not _gathers(local)


def _tokens_summed(local: LocalSizes) -> int:
    """Return the tokens whose rows this rank adds: with `allgather` those of all ranks."""
    return local.gathered_tokens * (local.mesh.size(local.mode.experts) if _gathers(local) else 1)


# Indices of a row that the sum of rows reads: its place by token, its token, and where the sum's kernel writes that.
_SUM_INDICES = 3


def _sum_bytes(local: LocalSizes, experts: Experts) -> int:
    """Return the bytes of the sum of rows, and of the indices of its kernel."""
    indices = _SUM_INDICES * rows_combined(local, experts) * INDEX
    return _tokens_summed(local) * local.arch.hidden_size * local.itemsize + indices


def total_bytes(items: tuple[KeptTensor, ...]) -> int:
    """Return the bytes of all tensors."""
    return sum(item.num_bytes for item in items)


def layer_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return the tensors that a layer without full recomputation keeps."""
    return tuple(_layer(local))


def run_activations(local: LocalSizes, run: LayerRun) -> int:
    """Return the bytes kept by a run of layers: with full recomputation its input and choices of experts, when
    offloaded nothing."""
    if run.is_offloaded or not run.layers:
        return 0
    if not run.is_recomputed:
        return _kept_in(local, run.layers)
    has_capacity = local.arch.balance is not None and local.arch.balance.capacity_factor is not None
    choice = INDEX + has_capacity  # and whether its expert takes it
    kinds = ((each, each.experts, count) for each, count in local.by_kind(run.layers))
    return local.residual + sum(n * each.home_tokens * experts.topk * choice for each, experts, n in kinds if experts)


def _kept_in(local: LocalSizes, layers: Iterable[int]) -> int:
    return sum(count * total_bytes(layer_activations(each)) for each, count in local.by_kind(layers))


def recomputed_activations(local: LocalSizes) -> int:
    """Return the most bytes of recomputed activations that exist while their backward runs.

    Offloaded activations count as well: those of the layer that is computed, and of the one that leaves or arrives.
    """
    whole, layers = replace(local, recompute=NO_RECOMPUTE), range(local.arch.num_layers)
    runs = (run.layers for run in local.recompute.runs(layers) if run.is_recomputed)
    # Most runs have as many layers of each kind as another.
    recomputed = {frozenset(layer_counts(local.arch, run).items()): run for run in runs}.values()
    kinds = [each for each, _ in local.by_kind(layers)]
    everything = [total_bytes(layer_activations(replace(each, recompute=NO_RECOMPUTE))) for each in kinds]
    kept = [total_bytes(layer_activations(each)) for each in kinds]
    if recomputed:
        again = max(_kept_in(whole, run) for run in recomputed) - local.residual
    else:
        again = max(size - left for size, left in zip(everything, kept, strict=True))
    if not local.recompute.offloads:
        return max(again, 0)
    transferred = local.residual if recomputed else max(kept)
    return max(again, *everything) + transferred


def embedding_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return what the embedding keeps: the indices of its rows, and its dropout mask."""
    plan = local.mode.embed.on(local.mesh)
    read = local.part(local.num_tokens, plan.m)
    items = [KeptTensor("embedding", "rows", read * (INDEX + 1 if plan.k else INDEX))]
    # Positions that restart are a view of a kept tensor.
    if local.arch.position_embedding_type == "learned_absolute" and not local.resets_positions:
        items.append(KeptTensor("embedding", "positions", local.tokens * INDEX))
    return (*items, *dropout_mask(local, "embedding_dropout"))


def head_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return what the final norm and the LM head keep; forward computes the head's dgrad and keeps it."""
    dx = KeptTensor("head", "gradient of its input", local.residual)
    return (*norm_tensors(local, "final_norm", local.tokens, local.hidden, local.splits_features), dx)


def rotary_tables(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return cos and sin of the rotary embedding, which all layers of a rank share."""
    copies = (("cos and sin", local.arch.seq_length), ("those of this rank", local.positions))
    return tuple(
        KeptTensor("rotary", what, 2 * length * rotary.num_channels * local.wide)
        for rotary in rotaries(local.arch)
        for what, length in copies[: 2 if local.mode.context else 1]
    )


def document_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return what all layers of a stage share for a packed microbatch: rotary tables of positions in documents."""
    tokens = local.sequences_read * local.positions
    return tuple(
        KeptTensor("documents", "cos and sin", 2 * tokens * rotary.num_channels * local.wide)
        for rotary in (rotaries(local.arch) if local.resets_positions else ())
    )


def deferred_wgrad_activations(local: LocalSizes) -> int:
    """Return the bytes that a layer keeps from dgrad to its deferred wgrad: X and dY of each matmul, of experts too."""
    kept, experts = linear_operands(local.matmuls, local), local.experts
    if experts is not None:
        widths = 2 * local.arch.hidden_size + (3 if local.is_gated else 2) * local.expert_ffn
        kept += local.expert_rows * widths * local.itemsize
    return kept


def linear_operands(matmuls: Mapping[str, LocalMatmul], local: LocalSizes) -> int:
    """Return the bytes of X and dY of each matmul."""
    elements = sum(matmul.x + matmul.y * local.mesh.size(matmul.plan.dy) for matmul in matmuls.values())
    return elements * local.itemsize


def _layer(local: LocalSizes) -> Iterator[KeptTensor]:
    sizes = local.tokens, local.hidden, local.splits_features
    norms = {site: list(norm_tensors(local, site, *sizes)) for site in local.arch.norm_sites}
    yield from norms.get("input_norm", ())
    yield KeptTensor(DOWN if local.arch.is_latent else QKV, "input", local.residual)
    yield from _latents(local)
    yield from _recomputed_core(local) if local.recompute.recomputes(CORE_ATTN) else _core(local)
    yield KeptTensor(PROJ, "input", local.inner(local.num_queries * local.arch.value_size))
    yield from norms.get("attention_output_norm", ())
    yield from dropout_mask(local, "attention_dropout")
    first = local.residual if local.experts is None else 0
    up = (*norms.get("post_attention_norm", ()), KeptTensor(FC1, "input", first))
    is_kept = local.arch.use_parallel_residual and up[0].what == "input"  # as attention's input
    yield from up[1:] if is_kept else up
    if local.experts is None:
        yield from activation_tensors(local, local.inner(local.ffn))
    else:
        yield from expert_tensors(local, local.experts)
    yield from norms.get("mlp_output_norm", ())
    yield from dropout_mask(local, "mlp_dropout")


def _latents(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield what the norms of latents keep, and the normed latents, which are inputs of the up projections."""
    for site, up, size in (("q_norm", Q_UP, local.arch.q_lora_rank), ("kv_norm", KV_UP, local.arch.kv_lora_rank)):
        if size is not None:
            width = local.part(size, local.mode.residual[1])
            yield from norm_tensors(local, f"attention.{site}", local.tokens, width, local.splits_features)
            yield KeptTensor(up, "input", local.tokens * width * local.itemsize)


def dropout_mask(local: LocalSizes, site: str) -> Iterator[KeptTensor]:
    """Yield the mask of dropout on the residual stream."""
    if local.arch.hidden_dropout:
        yield KeptTensor(site, "mask", local.tokens * local.hidden)


def norm_tensors(local: LocalSizes, site: str, rows: int, width: int, split: bool) -> Iterator[KeptTensor]:
    """Yield a norm's input and its statistics; its output is kept by the next module."""
    composed = local.arch.is_rms_norm and not local.kernels.fused_rms_norm and not split
    if not composed or local.itemsize == local.wide:
        yield KeptTensor(site, "input", rows * width * local.itemsize)
    yield from _statistics(local, site, rows, width, split)


def _statistics(local: LocalSizes, site: str, rows: int, width: int, split: bool) -> Iterator[KeptTensor]:
    is_layer_norm = not local.arch.is_rms_norm
    # Where there is no weight, ones, and unless sharded a bias of zeros.
    if made := (2 - split) * (local.arch.num_norm_tensors == 0) + local.arch.apply_layernorm_1p:
        yield KeptTensor(site, "weight or bias", made * width * local.itemsize)
    if split:
        kept = "mean and scale" if is_layer_norm else "scale"
        yield KeptTensor(site, kept, (1 + is_layer_norm) * rows * local.wide)
    elif is_layer_norm:
        wide = local.itemsize if local.kernels.narrow_statistics else local.wide
        yield KeptTensor(site, "mean and scale", 2 * rows * wide)
    else:
        yield KeptTensor(site, "scale", rows * local.wide)
        if not local.kernels.fused_rms_norm:
            copies = (1 if local.itemsize == local.wide else 2) * rows * width
            yield KeptTensor(site, "input scaled, and widened", copies * local.wide)


def _core(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield the tensors from qkv's output to attention's, fused or, with dropout, materialized."""
    kept: dict[tuple[str, str], KeptTensor] = {}
    last = {}
    path = latent_path if local.arch.is_latent else _projection_path
    for name, count in (("q", local.num_queries), ("k", local.num_groups), ("v", local.num_groups)):
        *before, last[name] = path(local, name, count)
        kept |= {item[:2]: item for item in before}
    if local.mode.context:
        queries = {"q": last["q"]} if keeps_queries(local) else {}
        exchanged = {what: KeptTensor("attention.core", what, size) for what, size in kept_by_exchange(local).items()}
        last = queries | exchanged
    attend = _materialized if local.drops_whole_keys else _fused
    kept |= {item[:2]: item for item in attend(local, last)}
    yield from kept.values()
    if local.arch.attention_output_gate:
        if _qkv_output(local)[:2] not in kept:
            yield _qkv_output(local)
        what = ("output before its gate", "sigmoid of the gate")
        yield from (KeptTensor("attention.core", each, local.inner(_width(local))) for each in what)


def _recomputed_core(local: LocalSizes) -> Iterator[KeptTensor]:
    """Yield the inputs of the attention core, of latents those of the up projections where these are recomputed."""
    if not local.arch.is_latent:
        yield _qkv_output(local)
    elif not local.recompute.recomputes(MLA_UP_PROJ):
        yield KeptTensor(Q_UP, "output", local.inner(local.num_queries * local.arch.key_size))
        yield _kv_up_output(local)
    if local.arch.is_latent:
        yield KeptTensor(DOWN, "rotary key", local.inner(local.arch.qk_pos_emb_head_dim))
    if local.keeps_result:
        yield _logsumexp(local)
        if local.arch.attention_output_gate:
            yield KeptTensor("attention.core", "output before its gate", local.inner(_width(local)))
        yield from uncut_output(local)


def _logsumexp(local: LocalSizes) -> KeptTensor:
    return KeptTensor("attention.core", "logsumexp", local.inner_tokens * local.num_queries * local.wide)


def _width(local: LocalSizes) -> int:
    return local.num_queries * local.arch.kv_channels


def _qkv_output(local: LocalSizes) -> KeptTensor:
    parts = 1 + local.arch.attention_output_gate
    return KeptTensor(QKV, "output", local.inner(parts * _width(local) + 2 * local.keys_width))


def _projection_path(local: LocalSizes, name: str, count: int) -> Iterator[KeptTensor]:
    """Yield what keeps q, k or v between qkv's output and attention; the last one is attention's input."""
    site, width = "attention.core", local.arch.kv_channels
    here = _qkv_output(local)
    norms, over_heads = name != "v" and local.arch.qk_layernorm, local.arch.qk_layernorm_scope == "head"
    if norms and not over_heads:
        features = count * width if name == "q" else local.keys_width
        yield from _head_norm(local, name, here, local.inner_tokens, features, bool(local.heads.axes))
        here = KeptTensor(site, f"{name} normed", local.inner(features))
    if name != "q" and local.heads.gather_axes:
        gathered = local.inner(local.keys_width) * local.mesh.size(local.heads.gather_axes)
        here = KeptTensor(site, f"{name} gathered", gathered)
    if norms and over_heads:
        yield from _head_norm(local, name, here, local.inner_tokens * count, width, False)
        here = KeptTensor(site, f"{name} normed", local.inner(count * width))
    if name != "v" and local.attention.rotary is not None:
        here = KeptTensor(site, f"{name} rotated", local.inner(count * width))
    if name != "q" and not local.heads.are_even:
        is_gathered = bool(local.mode.context) and local.mode.exchange == GATHER
        if not is_gathered or (name == "k" and local.drops_whole_keys):  # both are indexed together, or again
            yield KeptTensor(site, f"head of each {name}", local.num_queries * INDEX)
        here = KeptTensor(site, f"{name} for each head", local.inner(local.num_queries * width))
    yield here


def _head_norm(
    local: LocalSizes, name: str, here: KeptTensor, rows: int, width: int, split: bool
) -> Iterator[KeptTensor]:
    """Yield what the norm of q or k keeps, where `here` holds its input."""
    site = f"attention.{name}_norm"
    inputs = list(norm_tensors(local, site, rows, width, split))
    statistics = list(_statistics(local, site, rows, width, split))
    yield from statistics if len(inputs) == len(statistics) else [here, *statistics]


def _fused(local: LocalSizes, last: Mapping[str, KeptTensor]) -> Iterator[KeptTensor]:
    """Yield what fused attention keeps: q, k, v and a number per row of scores; its output is proj's input."""
    yield from last.values()
    is_packed = local.masks_documents or local.window is not None or bool(local.mode.context)
    is_packed = is_packed or not local.arch.has_vanilla_softmax
    if local.itemsize == 2 and local.arch.seq_length <= local.kernels.softmax_again and not is_packed:
        return
    yield _logsumexp(local)
    if local.arch.softmax_type == "off-by-one":
        yield KeptTensor("attention.core", "sinks of 0", local.num_queries * local.itemsize)
    yield from uncut_output(local) if not local.mode.context or keeps_queries(local) else ()


def _materialized(local: LocalSizes, last: Mapping[str, KeptTensor]) -> Iterator[KeptTensor]:
    """Yield copies of q, k and v by head, the scores after softmax, the mask and its result: [heads, S, S] each.

    Of longer sequences than `DROPOUT_ROWS` only q, k and v are kept.
    """
    site, seq = "attention.core", local.arch.seq_length
    if seq > DROPOUT_ROWS:
        yield from last.values()
        return
    scores = local.inner_tokens * local.num_queries * seq
    by_head = local.inner(local.num_queries * local.arch.kv_channels)
    is_copied = local.sequences > 1 and local.num_queries > 1
    yield KeptTensor(site, "q by head", by_head) if is_copied else last["q"]
    yield KeptTensor(site, "k and v by head", 2 * by_head)
    masks = local.sequences if local.masks_documents else 1
    yield KeptTensor(site, "positions not seen", masks * local.positions * seq)
    sinks = 0 if local.arch.softmax_type == "vanilla" else local.inner_tokens * local.num_queries
    yield KeptTensor(site, "softmax", (scores + sinks) * local.wide)
    if local.arch.attention_softcap is not None:
        yield KeptTensor(site, "tanh of scores", scores * local.wide)
    yield KeptTensor(site, "dropout mask", scores)
    yield KeptTensor(site, "softmax after dropout", scores * local.itemsize)


def num_ahead(local: LocalSizes, stage: Stage) -> int:
    """Return the modules of multi-token prediction in a stage."""
    return local.arch.mtp_num_layers if stage.has_head else 0


def ahead_activations(local: LocalSizes) -> tuple[KeptTensor, ...]:
    """Return what multi-token prediction keeps: for each module embedding, two norms and linears, layer, and head.

    With full recomputation a module keeps its two inputs only.
    """
    return local.arch.mtp_num_layers * tuple(_module_ahead(local))


def _module_ahead(local: LocalSizes) -> Iterator[KeptTensor]:
    yield embedding_activations(local)[0]
    if local.recompute.recomputes_ahead:
        for what in ("hidden state", "embedding"):
            yield KeptTensor("mtp", what, local.residual)
        yield head_activations(local)[-1]
        return
    yield from dropout_mask(local, "embedding_dropout")
    for site, linear in zip(("hidden_norm", "embedding_norm"), MTP_LINEARS, strict=True):
        yield from norm_tensors(local, site, local.tokens, local.hidden, local.splits_features)
        yield KeptTensor(linear, "input", local.residual)
    yield from layer_activations(local.layer_ahead)
    yield from head_activations(local)
