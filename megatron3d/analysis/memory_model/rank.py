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
    deferred_wgrad_activations,
    document_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    rotary_tables,
    run_activations,
    total_bytes,
)
from megatron3d.analysis.memory_model.step_spec import StepSpec
from megatron3d.analysis.memory_model.transient_peaks import embedding_peak, head_peaks, layer_peaks, matmuls
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
class RankMemory:
    """Bytes by category; `moments` are needed one at a time, and only the largest counts."""

    weights: int
    main_weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    transient_peaks: Mapping[str, int]

    @property
    def categories(self) -> dict[str, int]:
        """Bytes of each category by its name in words, the last one being the largest moment."""
        named = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)[:-1]}
        return named | {"moment": max(self.transient_peaks.values(), default=0)}

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.categories.values())


def rank_memory(step: StepSpec) -> RankMemory:
    """Of the rank at which the step's mesh is seen."""
    local, ranks = step.local, step.zero_ranks
    is_narrow = local.itemsize < local.wide
    mine = sum(-(-size // ranks) for size in flat_numels(step))
    activations, shards = peak_activations(step)
    between_steps = (0 if is_narrow else mine) if step.shards(3) else ranks * mine
    return RankMemory(
        weights=between_steps * local.itemsize,
        main_weights=mine * local.wide if is_narrow else 0,
        gradients=(mine if step.shards(2) else ranks * mine) * local.wide,
        optimizer=mine * sum(step.moment_itemsizes),
        activations=activations,
        buffers=shards + sum(buffers(step).values()),
        transient_peaks=transient_peaks(step) | _update_peak(step, activations + shards),
    )


class FlatBufferSize(NamedTuple):
    """A flat piece of memory: its elements, the axes that its gradients are summed over, who holds it, and the block of
    the network where it is one's own."""

    size: int
    reduce_axes: Axes
    holders: tuple[int, ...]
    block: str


def flat_numels(step: StepSpec) -> list[int]:
    """Elements of each flat piece of memory that my parameters lie in, which ZeRO cuts into equal parts and pads."""
    return [piece.size for piece in flat_buffer_sizes(step)]


def flat_buffer_sizes(step: StepSpec) -> list[FlatBufferSize]:
    """The pieces: parameters that are reduced alike share one of at least a bucket, or with ZeRO 3 of a block of the
    network."""
    mesh, is_by_block = step.local.mesh, step.shards(3)
    others = tuple(axis for axis in mesh.names if axis != "pipeline")
    least = math.inf if is_by_block else step.bucket_bytes / step.local.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str], list[int]] = {}
    for block, stage, spec in _params(step):
        copies = num_copies(spec.layout, mesh, others)
        key = spec.reduce_axes(mesh), copies, spec.holders, stage, block if is_by_block else ""
        groups.setdefault(key, []).append(math.prod(spec.local_shape(mesh)))
    return [
        FlatBufferSize(size, key[0], key[2], key[4])
        for key, sizes in groups.items()
        for size in _merge_small(sizes, least)
    ]


def _merge_small(sizes: list[int], least: float) -> list[int]:
    """Sums of neighbours of at least `least`, closed from the end, where backward begins."""
    sums = [0]
    for size in reversed(sizes):
        sums = [*sums, size] if sums[-1] >= least else [*sums[:-1], sums[-1] + size]
    return sums


def _params(step: StepSpec) -> Iterator[tuple[str, int, ParamSpec]]:
    """Block (`layers.3`, `embedding`, ...), stage and spec of each of my parameters."""
    for stage, specs in stage_specs(step.local.arch, step.local.mode, step.pipeline, step.coord).items():
        for path, spec in specs.items():
            yield ".".join(path.split(".")[: 2 if path.startswith("layers.") else 1]), stage, spec


def stage_activations(step: StepSpec, stage: Stage) -> int:
    """Bytes that one microbatch keeps in a stage from forward to backward."""
    local, runs = step.local, step.local.recompute.runs(stage.layers)
    embedding = embedding_activations(local) if stage.has_embedding else ()
    head = head_activations(local) if stage.has_head else ()
    first = next((run for run in runs if run.layers), None)
    reader = head if first is None else () if first.is_offloaded else layer_activations(local)
    holds_input = (first and first.is_repeated and not first.is_offloaded) or (reader and reader[0].what == "input")
    own_input = 0 if stage.has_embedding or holds_input else local.residual
    own_input += total_bytes(document_activations(local)) if stage.layers else 0
    return own_input + total_bytes(embedding) + sum(run_activations(local, run) for run in runs) + total_bytes(head)


def in_flight(step: StepSpec) -> dict[int, float]:
    """Microbatches in flight in each of my stages when my activations need most.

    Between its halves a split backward holds what weight gradients need, counted as a part of a microbatch.
    """
    series, sizes = _in_flight_over_time(step)
    most = max(range(len(step.actions)), key=lambda at: sum(series[stage][at] * size for stage, size in sizes.items()))
    return {stage: peak_activations[most] for stage, peak_activations in series.items()}


def _in_flight_over_time(step: StepSpec) -> tuple[dict[int, list[float]], dict[int, int]]:
    """Microbatches that each of my stages holds after each action, and the bytes of one."""
    series, sizes = {}, {}
    for stage in step.stages:
        size = sizes[stage.index] = stage_activations(step, stage)
        late = len(stage.layers) * deferred_wgrad_activations(step.local)
        nothing = Action(ActionKind.REDUCE, stage.index)
        mine = (action if action.stage == stage.index else nothing for action in step.actions)
        series[stage.index] = activations_in_flight(mine, late / max(size, 1))
    return series, sizes


def peak_activations(step: StepSpec) -> tuple[int, int]:
    """Bytes of activations, and of residual shards on their way, when both together need most."""
    series, sizes = _in_flight_over_time(step)
    shards = [count * step.local.residual for count in residual_shards(step)]
    activations = [
        round(sum(series[stage][at] * size for stage, size in sizes.items())) for at in range(len(step.actions))
    ]
    return max(zip(activations, shards, strict=True), key=sum)


def buffers(step: StepSpec) -> dict[str, int]:
    """Bytes of what is there all the time: the step's tokens, rotary tables, gathered weights that stay until backward,
    and where weights are shared out two whole blocks, one that computes and one that is gathered."""
    local = step.local
    token_bytes = _TOKEN_BYTES + _DOCUMENT_BYTES * (local.keeps_apart + local.begins_anew)
    blocks = Counter[str]()
    for block, _, spec in _params(step):
        blocks[block] += math.prod(spec.local_shape(local.mesh))
    return {
        "tokens": step.num_microbatches * local.sequences_read * local.arch.seq_length * token_bytes,
        "rotary tables": total_bytes(rotary_tables(local)),
        "gathered weights": gathered_weights(step),
        "whole blocks": _largest(2, blocks.values()) * local.itemsize if step.shards(3) else 0,
    }


def gathered_weights(step: StepSpec) -> int:
    """Bytes of my layers' weights as they are multiplied, where these stay from forward to backward."""
    if not step.local.overlap.keep_gathered_weights:
        return 0
    layer = sum(matmul.whole_w for matmul in matmuls(step.local).values() if matmul.plan.w)
    return layer * sum(len(stage.layers) for stage in step.stages) * step.local.itemsize


def _largest(count: int, sizes: Iterable[int]) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


def residual_shards(step: StepSpec) -> list[int]:
    """Residual shards that lie on this rank after each action: received, handed on to another stage, or sent."""
    where, most = stage_to_rank(step.pipeline.schedule), step.local.kernels.num_leaving
    lying, sent, counts = 0, 0, []
    for action in step.actions:
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


def transient_peaks(step: StepSpec) -> dict[str, int]:
    """Bytes of every moment on this rank by its name.

    Gradients that are shared out are whole for a moment: two pieces while they are reduced, those that are received,
    and under the backward of earlier layers, when a layer at least has given up what it kept, one more that is filled.
    """
    local, stages, sizes = step.local, step.stages, flat_numels(step)
    found = layer_peaks(local) if any(stage.layers for stage in stages) else {}
    if any(stage.has_embedding for stage in stages):
        found["backward of the embedding"] = embedding_peak(local)
    if any(stage.has_head for stage in stages):
        found |= head_peaks(step)
    if step.shards(2):
        third = _largest(3, sizes) - _largest(2, sizes)
        filled = max(third * local.wide - total_bytes(layer_activations(local)), 0)
        reduced = (_largest(2, sizes) + _largest(local.kernels.num_received, sizes)) * local.wide
        found = {name: size + reduced + filled for name, size in found.items()}
    return found


def _update_peak(step: StepSpec, is_over: int) -> dict[str, int]:
    """AdamW's update with moments narrower than the weights, in pieces; what flowed through the pipeline is over."""
    if min(step.moment_itemsizes) == step.local.wide:
        return {}
    most, parts = step.local.kernels.update_piece, [-(-size // step.zero_ranks) for size in flat_numels(step)]
    pieces = [min(most, part - start) for part in parts for start in range(0, min(part, 2 * most), most)]
    first, second = sorted([*pieces, 0])[-1:-3:-1]
    return {"update": max(_ROUNDED_BYTES * first, _COMPUTED_BYTES * first + _LEFT_BYTES * second) - is_over}
