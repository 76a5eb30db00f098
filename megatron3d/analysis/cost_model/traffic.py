"""Everything that a rank sends in a training step, and every operation of its products, in closed form.

    microbatches (layers + ends + crossings) + gradients and weights over the data axis + one sum of three numbers

A dry run of the step is held against it, call for call and byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron3d.analysis.cost_model.layer import linears
from megatron3d.analysis.memory_model.local_sizes import Work
from megatron3d.analysis.memory_model.rank import flat_pieces
from megatron3d.analysis.memory_model.step_spec import Job
from megatron3d.analysis.memory_model.transient_peaks import chunk_rows
from megatron3d.model.recompute_spec import CORE_ATTN
from megatron3d.model.stages import Stage
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, crossing, flows
from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import ActionKind
from megatron3d.pipeline.lower import count_transfers

Many = Iterator[tuple[int, Traffic]]


@dataclass(frozen=True)
class Sums:
    """Calls, and bytes that a rank sends over rings, by collective and axes."""

    calls: Counter[tuple[str, Axes]]
    sent: dict[tuple[str, Axes], float]


def step_traffic(job: Job) -> Sums:
    """Of the rank at which the job's mesh is seen."""
    found = Sums(Counter(), {})
    for count, call in _every(job):
        if count:
            key = call.collective, call.axes
            found.calls[key] += count
            found.sent[key] = found.sent.get(key, 0.0) + count * call.wire_bytes
    return found


def _every(job: Job) -> Many:
    for stage in job.stages:
        for call in _stage(job, stage):
            yield job.num_microbatches, call
        if job.work.overlap.keep_gathered_weights:
            for plan, m, n, k in len(stage.layers) * list(linears(job.work).values()):
                for call in flows(plan, job.work.mesh, m, n, k, job.work.itemsize).gather_w:
                    yield times_kept(job, stage), call
    work, pipeline = job.work, job.pipeline
    once, *joined = crossing(
        work.mode.residual, work.mode.copies, work.mesh, work.num_tokens, work.arch.hidden_size, work.itemsize
    )
    sends, receives = count_transfers(pipeline.schedule)[job.coord]
    yield sends, once
    for call in joined:
        yield receives, call
    yield from _data(job)
    everyone = work.mesh.nontrivial(work.mesh.names)
    if everyone:
        yield 1, _all_reduce(everyone, 3 * work.wide, work)


def times_kept(job: Job, stage: Stage) -> int:
    """How often weights are gathered that stay as long as some microbatch is between its forward and its backward."""
    change, users, times = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}, 0, 0
    for action in job.actions:
        if action.stage == stage.index:
            times += action.kind is ActionKind.F and users == 0
            users += change.get(action.kind, 0)
    return times


def _stage(job: Job, stage: Stage) -> Iterator[Traffic]:
    """Of one microbatch."""
    work = job.work
    for run in work.recompute.runs(stage.layers):
        for _ in run.layers:
            yield from _layer(work, forwards=2 if run.is_repeated else 1)
    if stage.has_embedding:
        arch, plan = work.arch, work.mode.embed
        sent = flows(plan, work.mesh, work.num_tokens, arch.hidden_size, arch.padded_vocab_size, work.itemsize)
        yield from (*sent.gather_w, *sent.reduce_y, *sent.gather_dy, *sent.reduce_dw)
    if stage.has_head:
        yield from _norm(work, 1)
        yield from _head(job)


def _layer(work: Work, forwards: int) -> Iterator[Traffic]:
    keeps = work.overlap.keep_gathered_weights
    for plan, m, n, k in linears(work).values():
        sent = flows(plan, work.mesh, m, n, k, work.itemsize)
        yield from forwards * (sent.gather_x + sent.reduce_y) + (not keeps) * (forwards + 1) * sent.gather_w
        yield from sent.gather_dy + sent.gather_x + sent.reduce_dx + sent.reduce_dw
    for _ in range(2):
        yield from _norm(work, forwards)
    axes = work.heads.gather_axes
    if axes:
        repeats = forwards + work.recompute.repeats(CORE_ATTN)
        num_bytes = work.inner(work.keys_width) * (work.mesh.size(axes) - 1)
        yield from 2 * repeats * [Traffic("all_gather", axes, num_bytes)]
        yield from 2 * [Traffic("reduce_scatter", axes, num_bytes)]


def _norm(work: Work, forwards: int) -> Iterator[Traffic]:
    """Mean and variance of each token, gathered, or its mean square, summed; in backward one sum or two."""
    axes, tokens = work.mesh.nontrivial(work.mode.residual[1]), work.tokens * work.wide
    if not axes:
        return
    centred = work.arch.normalization == "LayerNorm"
    gathered = Traffic("all_gather", axes, 2 * tokens * (work.mesh.size(axes) - 1))
    yield from forwards * [gathered if centred else _all_reduce(axes, tokens, work)]
    yield _all_reduce(axes, (1 + centred) * tokens, work)


def _head(job: Job) -> Iterator[Traffic]:
    """Chunk by chunk; the weight is gathered, and its gradient reduced, once."""
    work, arch = job.work, job.work.arch
    mesh, plan = work.mesh, work.mode.expand.on(work.mesh)
    rows, gathered = chunk_rows(job)
    vocabulary = mesh.nontrivial(plan.y_layout[1])
    whole = flows(plan, mesh, work.num_tokens, arch.padded_vocab_size, arch.hidden_size, work.itemsize)
    yield from whole.gather_w + whole.reduce_dw
    scattered = mesh.size(axis for axis, dim in plan.dy.items() if dim == "M")
    for start in range(0, work.tokens, rows):
        here = min(rows, work.tokens - start)
        tokens = here * gathered * mesh.size(plan.m)
        sent = flows(plan, mesh, tokens, arch.padded_vocab_size, arch.hidden_size, work.itemsize)
        yield from sent.gather_x + sent.reduce_y + sent.gather_dy + sent.reduce_dx
        if vocabulary:
            logits = here * gathered // scattered * work.wide
            yield from (_all_reduce(vocabulary, logits, work), _all_reduce(vocabulary, 2 * logits, work))


def _data(job: Job) -> Many:
    """Gradients of each flat piece, and weights where they are shared out."""
    work, m = job.work, job.num_microbatches
    shared: Axes = work.mesh.nontrivial(("data",)) if job.zero_stage else ()
    for piece in flat_pieces(job):
        ranks = work.mesh.size(shared)
        part = -(-piece.size // ranks)
        sums, rest = (m if job.shares(2) else 1), tuple(axis for axis in piece.reduce_axes if axis not in shared)
        if shared:
            yield sums, Traffic("reduce_scatter", shared, part * (ranks - 1) * job.reduce_itemsize)
        if rest:
            yield sums, _all_reduce(rest, part * job.reduce_itemsize, work)
        if len(piece.holders) > 1:
            yield 1, Traffic("add", ("pipeline",), part * work.wide if job.shares(1) else piece.size * work.wide)
        if shared and not job.shares(3):
            yield 1, Traffic("all_gather", shared, part * (ranks - 1) * work.itemsize)
    if job.shares(3):
        for name, size in block_parts(job):
            gathers = 1 if name in ("embedding", "head") else 2
            uses = m * (gathers + _is_tied_here(job) * (name == "embedding"))
            yield uses, Traffic("all_gather", shared, size * (work.mesh.size(shared) - 1) * work.itemsize)


def block_parts(job: Job) -> Sequence[tuple[str, int]]:
    """Name of the block of each flat piece of ZeRO 3, and the elements of a rank's part."""
    return [(piece.block, -(-piece.size // job.zero_ranks)) for piece in flat_pieces(job)]


def _is_tied_here(job: Job) -> bool:
    """Whether the head uses the embedding's matrix of this rank."""
    first, last = (any(getattr(stage, end) for stage in job.stages) for end in ("has_embedding", "has_head"))
    return job.work.arch.tie_embeddings and first and last


def _all_reduce(axes: Axes, num_bytes: float, work: Work) -> Traffic:
    ranks = work.mesh.size(axes)
    return Traffic("all_reduce", axes, 2 * num_bytes * (ranks - 1) / ranks)


def step_flops(job: Job) -> int:
    """Operations of a rank's products in a step: of attention all scores are counted, in backward four products."""
    total = 0
    for stage in job.stages:
        for run in job.work.recompute.runs(stage.layers):
            total += len(run.layers) * layer_flops_here(job.work, again=run.is_repeated)
        if stage.has_head:
            work, plan = job.work, job.work.mode.expand
            total += 3 * _product(work, plan, work.num_tokens, work.arch.padded_vocab_size, work.arch.hidden_size)
    return job.num_microbatches * total


def layer_flops_here(work: Work, again: bool) -> int:
    """Of one layer on this rank for one microbatch."""
    products = sum(_product(work, *each) for each in linears(work).values())
    seq = work.arch.seq_length
    attention = 4 * work.sequences * work.num_queries * seq * seq * work.arch.kv_channels
    repeats_core = not again and work.recompute.repeats(CORE_ATTN)
    return (3 + again) * products + (3 + again + repeats_core) * attention


def _product(work: Work, plan: MatmulPlan, m: int, n: int, k: int) -> int:
    size = work.mesh.size
    return 2 * (m // size(plan.m)) * (n // size(plan.n)) * (k // size(plan.k))
