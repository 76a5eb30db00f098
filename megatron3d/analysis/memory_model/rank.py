"""Memory of one rank by category, in closed form: what is kept between steps, from forward to backward, and briefly.

    weights + main weights + gradients + optimizer + activations of the microbatches in flight + buffers + a moment

The sum is the most that tensors need at one time, give or take a layer's activations: the largest moment need not come
when most microbatches are in flight.  What the allocator and libraries hold on top is not in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron3d.analysis.memory_model.activations import (
    document_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    put_off_activations,
    rotary_tables,
    run_activations,
    total,
)
from megatron3d.analysis.memory_model.step_spec import Job
from megatron3d.analysis.memory_model.transient_peaks import embedding_moment, head_moments, layer_moments, matmuls
from megatron3d.model.params import stage_specs
from megatron3d.model.stages import Stage
from megatron3d.parallel.layout import ParamSpec, num_copies
from megatron3d.parallel.mesh import Axes
from megatron3d.pipeline.actions import RECEIVES, SENDS, Action, ActionKind, activations_in_flight, stage_to_rank

# Of a microbatch: a token's index, in the batch and among its labels.
_TOKEN_BYTES = 2 * 8
# The number of its document, or its position there.
_DOCUMENT_BYTES = 8
# Of an element: what AdamW holds when it rounds a moment, when it computes, and of the piece before.
_ROUNDED_BYTES, _COMPUTED_BYTES, _LEFT_BYTES = 30, 20, 18


@dataclass(frozen=True)
class Memory:
    """Bytes by category; `moments` are needed one at a time, and only the largest counts."""

    weights: int
    main_weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    moments: Mapping[str, int]

    @property
    def categories(self) -> dict[str, int]:
        """Bytes of each category by its name in words, the last one being the largest moment."""
        named = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)[:-1]}
        return named | {"moment": max(self.moments.values(), default=0)}

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.categories.values())


def rank_memory(job: Job) -> Memory:
    """Of the rank at which the job's mesh is seen."""
    work, ranks = job.work, job.zero_ranks
    is_narrow = work.itemsize < work.wide
    mine = sum(-(-size // ranks) for size in flat_sizes(job))
    activations, shards = held(job)
    between_steps = (0 if is_narrow else mine) if job.shares(3) else ranks * mine
    return Memory(
        weights=between_steps * work.itemsize,
        main_weights=mine * work.wide if is_narrow else 0,
        gradients=(mine if job.shares(2) else ranks * mine) * work.wide,
        optimizer=mine * sum(job.moment_itemsizes),
        activations=activations,
        buffers=shards + sum(buffers(job).values()),
        moments=moments(job) | _update(job, activations + shards),
    )


class FlatPiece(NamedTuple):
    """A flat piece of memory: its elements, the axes that its gradients are summed over, who holds it, and the block of
    the network where it is one's own."""

    size: int
    reduce_axes: Axes
    holders: tuple[int, ...]
    block: str


def flat_sizes(job: Job) -> list[int]:
    """Elements of each flat piece of memory that my parameters lie in, which ZeRO cuts into equal parts and pads."""
    return [piece.size for piece in flat_pieces(job)]


def flat_pieces(job: Job) -> list[FlatPiece]:
    """The pieces: parameters that are reduced alike share one of at least a bucket, or with ZeRO 3 of a block of the
    network."""
    mesh, is_by_block = job.work.mesh, job.shares(3)
    others = tuple(axis for axis in mesh.names if axis != "pipeline")
    least = math.inf if is_by_block else job.bucket_bytes / job.work.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str], list[int]] = {}
    for block, stage, spec in _params(job):
        copies = num_copies(spec.layout, mesh, others)
        key = spec.reduce_axes(mesh), copies, spec.holders, stage, block if is_by_block else ""
        groups.setdefault(key, []).append(math.prod(spec.local_shape(mesh)))
    return [FlatPiece(size, key[0], key[2], key[4]) for key, sizes in groups.items() for size in _runs(sizes, least)]


def _runs(sizes: list[int], least: float) -> list[int]:
    """Sums of neighbours of at least `least`, closed from the end, where backward begins."""
    sums = [0]
    for size in reversed(sizes):
        sums = [*sums, size] if sums[-1] >= least else [*sums[:-1], sums[-1] + size]
    return sums


def _params(job: Job) -> Iterator[tuple[str, int, ParamSpec]]:
    """Block (`layers.3`, `embedding`, ...), stage and spec of each of my parameters."""
    for stage, specs in stage_specs(job.work.arch, job.work.mode, job.pipeline, job.coord).items():
        for path, spec in specs.items():
            yield ".".join(path.split(".")[: 2 if path.startswith("layers.") else 1]), stage, spec


def stage_activations(job: Job, stage: Stage) -> int:
    """Bytes that one microbatch keeps in a stage from forward to backward."""
    work, runs = job.work, job.work.recompute.runs(stage.layers)
    embedding = embedding_activations(work) if stage.has_embedding else ()
    head = head_activations(work) if stage.has_head else ()
    first = next((run for run in runs if run.layers), None)
    reader = head if first is None else () if first.is_offloaded else layer_activations(work)
    holds_input = (first and first.is_repeated and not first.is_offloaded) or (reader and reader[0].what == "input")
    own_input = 0 if stage.has_embedding or holds_input else work.residual
    own_input += total(document_activations(work)) if stage.layers else 0
    return own_input + total(embedding) + sum(run_activations(work, run) for run in runs) + total(head)


def in_flight(job: Job) -> dict[int, float]:
    """Microbatches in flight in each of my stages when my activations need most.

    Between its halves a split backward holds what weight gradients need, counted as a part of a microbatch.
    """
    series, sizes = _series(job)
    most = max(range(len(job.actions)), key=lambda at: sum(series[stage][at] * size for stage, size in sizes.items()))
    return {stage: held[most] for stage, held in series.items()}


def _series(job: Job) -> tuple[dict[int, list[float]], dict[int, int]]:
    """Microbatches that each of my stages holds after each action, and the bytes of one."""
    series, sizes = {}, {}
    for stage in job.stages:
        size = sizes[stage.index] = stage_activations(job, stage)
        late = len(stage.layers) * put_off_activations(job.work)
        nothing = Action(ActionKind.REDUCE, stage.index)
        mine = (action if action.stage == stage.index else nothing for action in job.actions)
        series[stage.index] = activations_in_flight(mine, late / max(size, 1))
    return series, sizes


def held(job: Job) -> tuple[int, int]:
    """Bytes of activations, and of residual shards on their way, when both together need most."""
    series, sizes = _series(job)
    shards = [count * job.work.residual for count in waiting(job)]
    activations = [
        round(sum(series[stage][at] * size for stage, size in sizes.items())) for at in range(len(job.actions))
    ]
    return max(zip(activations, shards, strict=True), key=sum)


def buffers(job: Job) -> dict[str, int]:
    """Bytes of what is there all the time: the step's tokens, rotary tables, gathered weights that stay until backward,
    and where weights are shared out two whole blocks, one that computes and one that is gathered."""
    work = job.work
    token_bytes = _TOKEN_BYTES + _DOCUMENT_BYTES * (work.keeps_apart + work.begins_anew)
    blocks = Counter[str]()
    for block, _, spec in _params(job):
        blocks[block] += math.prod(spec.local_shape(work.mesh))
    return {
        "tokens": job.num_microbatches * work.sequences_read * work.arch.seq_length * token_bytes,
        "rotary tables": total(rotary_tables(work)),
        "gathered weights": gathered_weights(job),
        "whole blocks": _largest(2, blocks.values()) * work.itemsize if job.shares(3) else 0,
    }


def gathered_weights(job: Job) -> int:
    """Bytes of my layers' weights as they are multiplied, where these stay from forward to backward."""
    if not job.work.overlap.keep_gathered_weights:
        return 0
    layer = sum(matmul.whole_w for matmul in matmuls(job.work).values() if matmul.plan.w)
    return layer * sum(len(stage.layers) for stage in job.stages) * job.work.itemsize


def _largest(count: int, sizes: Iterable[int]) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


def waiting(job: Job) -> list[int]:
    """Residual shards that lie on this rank after each action: received, handed on to another stage, or sent."""
    where, most = stage_to_rank(job.pipeline.schedule), job.work.kernels.num_leaving
    lying, sent, counts = 0, 0, []
    for action in job.actions:
        lying += _arrivals(action, where) - _consumed(action, len(where))
        sent = min(sent + (action.kind in SENDS), most)
        counts.append(lying + sent)
    return counts


def _arrivals(action: Action, where: Mapping[int, int]) -> int:
    """Shards that an action leaves behind on this rank."""
    if action.kind in RECEIVES:
        return 1
    step = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}.get(action.kind)
    return int(step is not None and where.get(action.stage + step) == where[action.stage])


def _consumed(action: Action, num_stages: int) -> int:
    """Shards that an action takes up."""
    ends = {ActionKind.F: 0, ActionKind.B: num_stages - 1, ActionKind.I: num_stages - 1}
    return int(action.kind in ends and action.stage != ends[action.kind])


def moments(job: Job) -> dict[str, int]:
    """Bytes of every moment on this rank by its name.

    Gradients that are shared out are whole for a moment: two pieces while they are reduced, those that are received,
    and under the backward of earlier layers, when a layer at least has given up what it kept, one more that is filled.
    """
    work, stages, sizes = job.work, job.stages, flat_sizes(job)
    found = layer_moments(work) if any(stage.layers for stage in stages) else {}
    if any(stage.has_embedding for stage in stages):
        found["backward of the embedding"] = embedding_moment(work)
    if any(stage.has_head for stage in stages):
        found |= head_moments(job)
    if job.shares(2):
        third = _largest(3, sizes) - _largest(2, sizes)
        filled = max(third * work.wide - total(layer_activations(work)), 0)
        reduced = (_largest(2, sizes) + _largest(work.kernels.num_received, sizes)) * work.wide
        found = {name: size + reduced + filled for name, size in found.items()}
    return found


def _update(job: Job, is_over: int) -> dict[str, int]:
    """AdamW's update with moments narrower than the weights, in pieces; what flowed through the pipeline is over."""
    if min(job.moment_itemsizes) == job.work.wide:
        return {}
    most, parts = job.work.kernels.update_piece, [-(-size // job.zero_ranks) for size in flat_sizes(job)]
    pieces = [min(most, part - start) for part in parts for start in range(0, min(part, 2 * most), most)]
    first, second = sorted([*pieces, 0])[-1:-3:-1]
    return {"update": max(_ROUNDED_BYTES * first, _COMPUTED_BYTES * first + _LEFT_BYTES * second) - is_over}
