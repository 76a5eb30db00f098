"""Closed forms of the bytes that a rank sends in a training step, and of its GEMM FLOPs.

    microbatches (layers + ends + crossings) + gradients and weights over the data axis + one sum of a few numbers

A dry run of the step is compared with it, call by call and byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron3d.attention.context.plan import exchange_traffic
from megatron3d.attention.plan import latent_traffic
from megatron3d.forecast.memory.activations import num_ahead
from megatron3d.forecast.memory.local_sizes import LocalMatmul, LocalSizes
from megatron3d.forecast.memory.rank import flat_buffer_sizes
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.forecast.memory.transient_peaks import chunk_rows
from megatron3d.forecast.time.experts import counts_of_routers, expert_flops, expert_traffic, not_recomputed
from megatron3d.forecast.time.layer import linears_from_latents, traffic_from_latents
from megatron3d.linear.overlap_plan import in_rounds
from megatron3d.model.spec import CORE_ATTN
from megatron3d.model.stage_plan import Stage
from megatron3d.ops.plan import relayout_traffic
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Traffic, crossing, flows, ring
from megatron3d.parallel.mesh import PIPELINE, Axes
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.lower import count_transfers

CountedTraffic = Iterator[tuple[int, Traffic]]


@dataclass(frozen=True)
class StepTraffic:
    """Number of collectives, and bytes that a rank sends over rings, by collective and axes."""

    calls: Counter[tuple[str, Axes]]
    sent: dict[tuple[str, Axes], float]


def step_traffic(step: StepSpec, is_logged: bool = False) -> StepTraffic:
    """Return the traffic of the rank that the step's mesh is seen from; logged steps also have metrics of routers."""
    found = StepTraffic(Counter(), {})
    for count, call in _step_calls(step, is_logged):
        if count:
            key = call.collective, call.axes
            found.calls[key] += count
            found.sent[key] = found.sent.get(key, 0.0) + count * call.wire_bytes
    return found


def _step_calls(step: StepSpec, is_logged: bool) -> CountedTraffic:
    for stage in step.stages:
        for call in _stage(step, stage):
            yield step.num_microbatches, call
        for run in step.local.recompute.runs(stage.layers):
            for call in not_recomputed(replace(step.local, layer=run.layers[-1])) if run.is_recomputed else ():
                yield -step.num_microbatches, call
        yield from _input_grads(step, stage)
        if step.local.overlap.keep_gathered_weights:
            for sent, _ in _stage_linears(step.local, stage):
                for call in sent.gather_w:
                    yield kept_weight_gathers(step, stage), call
    local, pipeline = step.local, step.pipeline
    once, *joined = crossing(
        local.mode.residual, local.mode.copies, local.mesh, local.num_tokens, local.arch.hidden_size, local.itemsize
    )
    sends, receives = count_transfers(pipeline.schedule)[step.coord]
    yield sends, once
    for call in joined:
        yield receives, call
    yield from _data(step)
    if everyone := local.mesh.nontrivial(local.mesh.names):
        yield 1, ring("all_reduce", everyone, (3 + local.arch.mtp_num_layers) * local.wide, local.mesh)
        yield from ((1, call) for call in counts_of_routers(local, is_logged))


def kept_weight_gathers(step: StepSpec, stage: Stage) -> int:
    """Return the number of all-gathers of weights that are kept while a microbatch is in flight."""
    change, users = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}, 0
    times = 0
    for action in step.actions:
        if action.stage == stage.index:
            times += action.kind is ActionKind.F and users == 0
            users += change.get(action.kind, 0)
    return times


def _stage(step: StepSpec, stage: Stage) -> Iterator[Traffic]:
    """Yield the collectives of one microbatch in a stage."""
    local = step.local
    for run in local.recompute.runs(stage.layers):
        for each, count in local.by_kind(run.layers):
            yield from count * list(_layer(each, forwards=2 if run.is_recomputed else 1))
    if stage.has_embedding:
        yield from _embedding(local)
    if stage.has_head:
        yield from _norm(local, 1)
        yield from _head(step)
        for _ in range(local.arch.mtp_num_layers):
            yield from (*_embedding(local), *_ahead(local), *_head(step))


def _embedding(local: LocalSizes) -> Iterator[Traffic]:
    arch, plan = local.arch, local.mode.embed
    sent = flows(plan, local.mesh, local.num_tokens, arch.hidden_size, arch.padded_vocab_size, local.itemsize)
    yield from (*sent.gather_w, *sent.reduce_y, *sent.gather_dy, *sent.reduce_dw)


def _ahead(local: LocalSizes) -> Iterator[Traffic]:
    """Yield the collectives of a module of multi-token prediction, without those of its embedding and its LM head."""
    mode, forwards = local.mode, 2 if local.recompute.recomputes_ahead else 1
    for _ in range(3):
        yield from _norm(local, forwards)
    yield from _linears(local, local.mtp_matmuls, forwards)
    whole_bytes = local.num_tokens * local.arch.hidden_size * local.itemsize
    yield from forwards * relayout_traffic(mode.inner, mode.residual, local.mesh, whole_bytes)
    yield from relayout_traffic(mode.residual, mode.inner, local.mesh, whole_bytes)
    yield from _layer(local.layer_ahead, forwards)


def _linears(local: LocalSizes, matmuls: Mapping[str, LocalMatmul], forwards: int) -> Iterator[Traffic]:
    keeps = local.overlap.keep_gathered_weights
    for sent, named in _linear_flows(local, matmuls):
        yield from forwards * (named.gather_x + named.reduce_y) + (not keeps) * (forwards + 1) * sent.gather_w
        yield from named.gather_dy + sent.gather_x + sent.reduce_dw


def _layer(local: LocalSizes, forwards: int) -> Iterator[Traffic]:
    yield from _linears(local, local.matmuls, forwards)
    yield from traffic_from_latents(local)
    for _ in local.arch.norm_sites:
        yield from _norm(local, forwards)
    repeats = forwards + local.recompute.recomputes(CORE_ATTN)
    if local.arch.qk_layernorm and local.arch.qk_layernorm_scope == "projection":
        rows, features = local.inner_tokens, local.mesh.nontrivial(local.mode.inner[1])
        for _ in range(2):
            yield from _norm_of(rows, features, local, repeats)
    yield from _latents(local, forwards)
    axes = local.heads.gather_axes
    if axes:
        num_bytes = local.inner(local.keys_width) * (local.mesh.size(axes) - 1)
        yield from 2 * repeats * [Traffic("all_gather", axes, num_bytes)]
        yield from 2 * [Traffic("reduce_scatter", axes, num_bytes)]
    yield from context_traffic(local, forwards)
    if local.experts is not None:
        yield from expert_traffic(local, local.experts, forwards)


def _latents(local: LocalSizes, forwards: int) -> Iterator[Traffic]:
    """Yield the collectives of the latents' norms, and of the rotary key that all heads share."""
    arch, mode, mesh = local.arch, local.mode, local.mesh
    if not arch.is_latent:
        return
    for _ in arch.latent_sizes:
        yield from _norm(local, forwards)
    sizes = mode.expand, mesh, local.num_tokens, arch.qk_pos_emb_head_dim, local.itemsize
    yield from forwards * latent_traffic(*sizes, backward=False)
    yield from latent_traffic(*sizes, backward=True)


def context_traffic(local: LocalSizes, forwards: int) -> Iterator[Traffic]:
    """Yield the exchanges between context ranks: of each forward, of attention that is recomputed, and of backward.

    Recomputation keeps the output of attention, except where its weights have dropout.
    """
    mode = local.mode
    if not mode.context:
        return
    given = mode.exchange, mode.context, local.exchange, local.mesh
    there = exchange_traffic(*given, backward=False).calls
    yield from forwards * there
    if local.recompute.recomputes(CORE_ATTN):
        yield from exchange_traffic(*given, backward=False, again=local.keeps_result).calls
    yield from exchange_traffic(*given, backward=True).calls


def _input_grads(step: StepSpec, stage: Stage) -> CountedTraffic:
    """Yield the reductions of dX in a stage's layers, which run in rounds where no wgrad GEMM hides them."""
    overlap = step.local.overlap
    for kind in (ActionKind.B, ActionKind.I):
        count = sum(action.kind is kind and action.stage == stage.index for action in step.actions)
        is_hidden = kind is ActionKind.B and overlap.input_grad
        for sent, named in _stage_linears(step.local, stage):
            for call in sent.reduce_dx if is_hidden else named.reduce_dx:
                yield count, call


def _stage_linears(local: LocalSizes, stage: Stage) -> list[tuple[Flows, Flows]]:
    """Return the collectives of all linears of a stage, as `_linear_flows` does."""
    ahead = num_ahead(local, stage)
    layers = [each for each, count in local.by_kind(stage.layers) for _ in range(count)] + ahead * [local.layer_ahead]
    found = [flow for each in layers for flow in _linear_flows(each, each.matmuls)]
    return found + ahead * _linear_flows(local, local.mtp_matmuls)


def _linear_flows(local: LocalSizes, matmuls: Mapping[str, LocalMatmul]) -> list[tuple[Flows, Flows]]:
    """Return the collectives of linears: plain, and with those in rounds under their names."""
    found = []
    for plan, m, n, k, *_ in matmuls.values():
        sent = flows(plan, local.mesh, m, n, k, local.itemsize, wgrad_itemsize=local.wgrad_itemsize)
        found.append((sent, in_rounds(sent, plan) if local.overlap.in_rounds else sent))
    return found


def _norm(local: LocalSizes, forwards: int) -> Iterator[Traffic]:
    """Yield the collectives of a norm of the residual stream."""
    yield from _norm_of(local.tokens, local.mesh.nontrivial(local.mode.residual[1]), local, forwards)


def _norm_of(rows: int, axes: Axes, local: LocalSizes, forwards: int) -> Iterator[Traffic]:
    """Yield the collectives of the statistics of a norm over features that `axes` split, and of their gradients."""
    if not axes:
        return
    num_bytes, centred = rows * local.wide, not local.arch.is_rms_norm
    gathered = Traffic("all_gather", axes, 2 * num_bytes * (local.mesh.size(axes) - 1))
    yield from forwards * [gathered if centred else ring("all_reduce", axes, num_bytes, local.mesh)]
    yield ring("all_reduce", axes, (1 + centred) * num_bytes, local.mesh)


def _head(step: StepSpec) -> Iterator[Traffic]:
    """Yield the collectives of the LM head by chunks; its weight is gathered, and dW reduced, once."""
    local, arch = step.local, step.local.arch
    mesh, plan = local.mesh, local.mode.expand.on(local.mesh)
    rows, gathered = chunk_rows(step)
    vocabulary = mesh.nontrivial(plan.y_layout[1])
    sizes = local.num_tokens, arch.padded_vocab_size, arch.hidden_size, local.itemsize
    whole = flows(plan, mesh, *sizes, wgrad_itemsize=local.wgrad_itemsize)
    yield from whole.gather_w + whole.reduce_dw
    scattered = mesh.size(axis for axis, dim in plan.dy.items() if dim == "M")
    for start in range(0, local.tokens, rows):
        here = min(rows, local.tokens - start)
        tokens = here * gathered * mesh.size(plan.m)
        sent = flows(plan, mesh, tokens, arch.padded_vocab_size, arch.hidden_size, local.itemsize)
        yield from sent.gather_x + sent.reduce_y + sent.gather_dy + sent.reduce_dx
        if vocabulary:
            logits = here * gathered // scattered * local.wide
            yield from (ring("all_reduce", vocabulary, count * logits, mesh) for count in (1, 2))


def _data(step: StepSpec) -> CountedTraffic:
    """Yield reductions of each flat buffer's gradients, and all-gathers of weights that ZeRO shards."""
    local, m = step.local, step.num_microbatches
    for piece in flat_buffer_sizes(step):
        shared, ranks, part = piece.zero_axes, piece.num_shards, piece.shard
        sums, rest = (m if step.shards(2) else 1), tuple(axis for axis in piece.reduce_axes if axis not in shared)
        if shared:
            yield sums, Traffic("reduce_scatter", shared, part * (ranks - 1) * step.reduce_itemsize)
        if rest:
            yield sums, ring("all_reduce", rest, part * step.reduce_itemsize, local.mesh)
        if len(piece.holders) > 1:
            yield 1, Traffic("add", (PIPELINE,), part * local.wide if step.shards(1) else piece.size * local.wide)
        if shared and not step.shards(3):
            yield 1, Traffic("all_gather", shared, part * (ranks - 1) * local.itemsize)
    if step.shards(3):
        for piece in (piece for piece in flat_buffer_sizes(step) if piece.zero_axes):
            sent = piece.shard * (piece.num_shards - 1) * local.itemsize
            yield m * step.unit_gathers(piece.block), Traffic("all_gather", piece.zero_axes, sent)


def step_flops(step: StepSpec) -> int:
    """Return the FLOPs of a rank's GEMMs in a step; attention counts all scores, and four GEMMs in backward."""
    total = 0
    for stage in step.stages:
        for run in step.local.recompute.runs(stage.layers):
            for local, count in step.local.by_kind(run.layers):
                total += count * local_layer_flops(local, again=run.is_recomputed)
        if stage.has_head:
            local, plan, ahead = step.local, step.local.mode.expand, step.local.arch.mtp_num_layers
            sizes = local.num_tokens, local.arch.padded_vocab_size, local.arch.hidden_size
            total += 3 * (1 + ahead) * _gemm_flops(local, plan, *sizes)
            again = local.recompute.recomputes_ahead
            linears = sum(_gemm_flops(local, *matmul[:4]) for matmul in local.mtp_matmuls.values())
            total += ahead * (local_layer_flops(local.layer_ahead, again) + (3 + again) * linears)
    return step.num_microbatches * total


def local_layer_flops(local: LocalSizes, again: bool) -> int:
    """Return the FLOPs of one layer on this rank for one microbatch."""
    products = sum(_gemm_flops(local, *matmul[:4]) for matmul in local.matmuls.values())
    projections = sum(_gemm_flops(local, *matmul[:4]) for matmul in linears_from_latents(local))
    recomputes_core = not again and local.recompute.recomputes(CORE_ATTN) and not local.keeps_result
    scores = (1 + again + recomputes_core) * local.scores(backward=False) + 2 * local.scores(backward=True)
    if local.experts is not None:
        products += expert_flops(local, local.experts)
    return (3 + again) * products + projections + 4 * scores * local.arch.kv_channels


def _gemm_flops(local: LocalSizes, plan: MatmulPlan, m: int, n: int, k: int) -> int:
    size = local.mesh.size
    return 2 * (m // size(plan.m)) * (n // size(plan.n)) * (k // size(plan.k))
