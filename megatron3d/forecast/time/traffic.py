"""Closed forms of the bytes that a rank sends in a training step, and of its GEMM FLOPs.

    microbatches (layers + ends + crossings) + gradients and weights over the data axis + one sum of a few numbers

A dry run of the step is compared with it, call by call and byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron3d.forecast.memory.activations import modules_of, num_ahead
from megatron3d.forecast.memory.flat_buffers import FlatBufferSize, flat_buffer_sizes
from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.forecast.time.tasks import (
    AGAIN,
    FORWARD,
    SPLIT_DGRAD,
    SPLIT_WGRAD,
    WEIGHT,
    WHOLE,
    tasks_of,
)
from megatron3d.linear.fp8_plan import LARGEST_BYTES
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operation import Operation
from megatron3d.model.operations import ahead_operations, embedding_operations, head_operations, layer_operations
from megatron3d.model.spec import counts_each_step, counts_shape
from megatron3d.model.stage_plan import Stage
from megatron3d.parallel.matmul_plan import Traffic, crossing, ring
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh
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
        yield from _stage(step, stage)
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


def _stage(step: StepSpec, stage: Stage) -> CountedTraffic:
    """Yield the collectives of a stage's tasks, as often as each phase runs."""
    kinds = Counter(action.kind for action in step.actions if action.stage == stage.index)
    counts = {
        FORWARD: kinds[ActionKind.F],
        SPLIT_DGRAD: kinds[ActionKind.I],
        SPLIT_WGRAD: kinds[ActionKind.W],
        WHOLE: kinds[ActionKind.B],
        AGAIN: kinds[ActionKind.I] + kinds[ActionKind.B],
    }
    for operations, local, number, is_recomputed in _lists(step.local, stage):
        for task in tasks_of(operations, local, is_recomputed):
            times = sum(counts[phase] for phase in task.phases)
            if task.what == WEIGHT and local.overlap.keep_gathered_weights:
                times = kept_weight_gathers(step, stage) if task.phases == FORWARD else 0
            yield from ((number * times, call) for call in task.calls)
    for run in step.local.recompute.runs(stage.layers):
        last = layer_operations(replace(step.local, layer=run.layers[-1])) if run.is_recomputed else []
        for each in _behind_all_saved(last):
            yield from ((-counts[AGAIN], call) for call in each.sent_again(()))


def _lists(local: LocalSizes, stage: Stage) -> Iterator[tuple[Sequence[Operation], LocalSizes, int, bool]]:
    """Yield the lists of operations of a stage, how many there are of each, and whether they are recomputed."""
    for run in local.recompute.runs(stage.layers):
        yield from (
            (layer_operations(each), each, count, run.is_recomputed) for each, count in local.by_kind(run.layers)
        )
    ahead, again = num_ahead(local, stage), local.recompute.recomputes_ahead
    norm, *head = head_operations(local)
    yield embedding_operations(local), local, stage.has_embedding + ahead, False
    yield [norm], local, int(stage.has_head), False
    yield head, local, stage.has_head + ahead, False
    if ahead:
        yield [*ahead_operations(local), norm], local, ahead, again
        yield layer_operations(local.layer_ahead), local.layer_ahead, ahead, again


def _behind_all_saved(operations: Sequence[Operation]) -> Sequence[Operation]:
    """Return the operations behind the last one that saves anything, where recomputation stops."""
    return operations[1 + max((place for place, each in enumerate(operations) if each.saves), default=-1) :]


def counts_of_routers(local: LocalSizes, is_logged: bool) -> list[Traffic]:
    """Return the all-reduce of what all routers counted in a step, which the metrics of a logged step need as well."""
    rows, columns = counts_shape(local.arch)
    if not rows or not (is_logged or counts_each_step(local.arch)):
        return []
    return [ring("all_reduce", local.mesh.nontrivial(local.mesh.names), 8 * rows * columns, local.mesh)]


def _data(step: StepSpec) -> CountedTraffic:
    """Yield reductions of each flat buffer's gradients, and all-gathers of weights that ZeRO shards."""
    local, m, flats = step.local, step.num_microbatches, flat_buffer_sizes(step)
    for piece in flats:
        shared, ranks, part = piece.zero_axes, piece.num_shards, piece.shard
        sums, rest = (m if step.shards(2) else 1), tuple(axis for axis in piece.reduce_axes if axis not in shared)
        if shared:
            yield sums, Traffic("reduce_scatter", shared, part * (ranks - 1) * step.reduce_itemsize)
        if rest:
            yield sums, ring("all_reduce", rest, part * step.reduce_itemsize, local.mesh)
        if len(piece.holders) > 1:
            yield 1, Traffic("add", (PIPELINE,), part * local.wide if step.shards(1) else piece.size * local.wide)
        if shared and not step.shards(3):
            yield 1, Traffic("all_gather", shared, part * (ranks - 1) * piece.itemsize)
    if step.shards(3):
        for piece in (piece for piece in flats if piece.zero_axes):
            sent = piece.shard * (piece.num_shards - 1) * piece.itemsize
            yield m * step.unit_gathers(piece.block), Traffic("all_gather", piece.zero_axes, sent)
    yield from ((1, call) for call in _largest_values(flats, local.mesh))


def _largest_values(flats: Sequence[FlatBufferSize], mesh: Mesh) -> Iterator[Traffic]:
    """Yield the all-reduces of the largest values of weights that are stored in fp8, all of the same axes together.

    A flat shard may cut blocks, and axes may split blocks that are the whole tensor.
    """
    by_shards, by_axes = Counter[Axes](), Counter[Axes]()
    for blocks, axes in ((flat.blocks, flat.zero_axes) for flat in flats if flat.blocks):
        by_shards[axes] += blocks.num_blocks
        by_axes.update(blocks.split_by)
    for axes, count in (*by_shards.items(), *by_axes.items()):
        if axes:
            yield ring("all_reduce", axes, count * LARGEST_BYTES, mesh)


def step_flops(step: StepSpec) -> int:
    """Return the FLOPs of a rank's GEMMs in a step; attention counts all scores, and four GEMMs in backward."""
    total = 0
    for stage in step.stages:
        for run in step.local.recompute.runs(stage.layers):
            for local, count in step.local.by_kind(run.layers):
                total += count * local_layer_flops(local, again=run.is_recomputed)
        if stage.has_head:
            local, ahead = step.local, step.local.arch.mtp_num_layers
            total += (1 + ahead) * _flops(head_operations(local), (), again=False)
            again = local.recompute.recomputes_ahead
            modules = _flops(ahead_operations(local), (), again)
            total += ahead * (local_layer_flops(local.layer_ahead, again) + modules)
    return step.num_microbatches * total


def local_layer_flops(local: LocalSizes, again: bool) -> int:
    """Return the FLOPs of one layer on this rank for one microbatch."""
    return _flops(layer_operations(local), modules_of(local), again)


def _flops(operations: Sequence[Operation], modules: Collection[object], again: bool) -> int:
    total = sum(each.flops + each.backward_flops for each in operations)
    if again:
        return total + sum(each.flops for each in operations)
    return total + sum(each.flops_again(modules) for each in operations if each.is_again(modules))
