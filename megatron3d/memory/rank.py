"""Memory of one rank by category, in closed form: what is kept between steps, from forward to backward, and briefly.

    weights + main weights + gradients + optimizer + activations of the microbatches in flight + buffers + a moment

The sum is the most that tensors need at one time, give or take a layer's activations: the largest moment need not come
when most microbatches are in flight.  What the allocator and libraries hold on top is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megatron3d.memory.activations import (
    embedding_activations,
    head_activations,
    layer_activations,
    put_off_activations,
    rotary_tables,
    total,
)
from megatron3d.memory.job import Job
from megatron3d.memory.momentary import embedding_moment, head_moment, layer_moments
from megatron3d.mesh import Axes, Mesh
from megatron3d.model.params import DATA, stage_specs
from megatron3d.model.stages import Stage
from megatron3d.pipeline.actions import RECEIVES, SENDS, Action, Kind, kept, owners

# Of a microbatch: a token's index, in the batch and among its labels.
_TOKEN_BYTES = 2 * 8
# Of an element: both moments, their ratio and a random number in fp32 or int32, and one of them in bf16.
_UPDATE_BYTES = 30


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
    work, zero = job.work, job.zero
    whole, split = num_params(job, work.mesh, ()), num_params(job, zero.split(work.mesh), DATA)
    main, gradients, weights = (split if zero.stage >= stage else whole for stage in (1, 2, 3))
    activations, shards = held(job)
    return Memory(
        weights=weights * work.itemsize,
        main_weights=main * work.wide if work.itemsize < work.wide else 0,
        gradients=gradients * work.wide,
        optimizer=main * sum(job.moment_itemsizes),
        activations=activations,
        buffers=shards + sum(buffers(job).values()),
        moments=moments(job) | _update(job, main, activations + shards),
    )


def num_params(job: Job, mesh: Mesh, also: Axes) -> int:
    """Parameters that the rank holds when axes `also` split them further, along their first dimension."""
    return sum(sum(sizes.values()) for sizes in _param_sizes(job, mesh, also).values())


def _param_sizes(job: Job, mesh: Mesh, also: Axes = ()) -> dict[str, dict[str, int]]:
    """Elements of each of my parameters by block (`layers.3`, `embedding`, ...) and path."""
    blocks: dict[str, dict[str, int]] = {}
    for specs in stage_specs(job.work.arch, job.work.mode, job.pipeline, job.coord).values():
        for path, spec in specs.items():
            first, *rest = spec.layout
            shape = replace(spec, layout=((*first, *also), *rest)).local_shape(mesh)
            block = ".".join(path.split(".")[:2]) if path.startswith("layers.") else path.partition(".")[0]
            blocks.setdefault(block, {})[path] = math.prod(shape)
    return blocks


def stage_activations(job: Job, stage: Stage) -> int:
    """Bytes that one microbatch keeps in a stage from forward to backward."""
    work = job.work
    pieces = [layer_activations(work)] * len(stage.layers)
    if stage.has_embedding:
        pieces.insert(0, embedding_activations(work))
    if stage.has_head:
        pieces.append(head_activations(work))
    holds_input = stage.has_embedding or (pieces and pieces[0][0].what == "input")
    return sum(map(total, pieces)) + (0 if holds_input else work.residual)


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
        nothing = Action(Kind.REDUCE, stage.index)
        mine = (action if action.stage == stage.index else nothing for action in job.actions)
        series[stage.index] = kept(mine, late / max(size, 1))
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
    """Bytes of what is there all the time: the step's tokens, rotary tables, and what ZeRO brings together.

    ZeRO 2 and 3 have two buckets of gradients at a time (one is filled while one is reduced), ZeRO 3 two whole blocks.
    """
    work, stage = job.work, job.zero.stage
    sequences = work.part(work.micro_batch_size, work.mode.batch_axes)
    blocks = _param_sizes(job, work.mesh)
    every = [size for sizes in blocks.values() for size in sizes.values()]
    bucket = job.bucket_bytes + max(every, default=0) * work.wide
    found = {
        "tokens": job.num_microbatches * sequences * work.arch.seq_length * _TOKEN_BYTES,
        "rotary tables": total(rotary_tables(work)),
        "buckets of gradients": round(min(2 * bucket, sum(every) * work.wide)) if stage >= 2 else 0,
        "whole blocks": sum(sorted(sum(sizes.values()) for sizes in blocks.values())[-2:]) * work.itemsize,
    }
    return found if stage >= 3 else found | {"whole blocks": 0}


def waiting(job: Job) -> list[int]:
    """Residual shards that lie on this rank after each action: received, handed on to another stage, or sent."""
    where, keeps_sent = owners(job.pipeline.schedule), job.work.kernels.keeps_sent
    lying, sent, counts = 0, 0, []
    for action in job.actions:
        lying += _arrivals(action, where) - _consumed(action, len(where))
        sent = sent + (action.kind in SENDS) if keeps_sent else int(action.kind in SENDS)
        counts.append(lying + sent)
    return counts


def _arrivals(action: Action, where: Mapping[int, int]) -> int:
    """Shards that an action leaves behind on this rank."""
    if action.kind in RECEIVES:
        return 1
    step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind)
    return int(step is not None and where.get(action.stage + step) == where[action.stage])


def _consumed(action: Action, num_stages: int) -> int:
    """Shards that an action takes up."""
    ends = {Kind.F: 0, Kind.B: num_stages - 1, Kind.I: num_stages - 1}
    return int(action.kind in ends and action.stage != ends[action.kind])


def moments(job: Job) -> dict[str, int]:
    """Bytes of every moment on this rank by its name."""
    work, stages = job.work, job.stages
    found = layer_moments(work) if any(stage.layers for stage in stages) else {}
    if any(stage.has_embedding for stage in stages):
        found["backward of the embedding"] = embedding_moment(work)
    if any(stage.has_head for stage in stages):
        found["head and loss"] = head_moment(job)
    return found


def _update(job: Job, num_main: int, is_over: int) -> dict[str, int]:
    """AdamW's update with moments narrower than the weights, in pieces; what flowed through the pipeline is over."""
    if min(job.moment_itemsizes) == job.work.wide:
        return {}
    return {"update": _UPDATE_BYTES * min(job.work.kernels.update_piece, num_main) - is_over}
