"""Flat buffers of a rank's parameters and gradients, as `zero/flat_buffer.py` makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.param_spec import stage_specs
from megatron3d.parallel.layout import ParamSpec, shard_numel
from megatron3d.parallel.mesh import PIPELINE, Axes


class FlatBufferSize(NamedTuple):
    """Flat buffer of a rank: elements, axes that reduce its gradients, pipeline ranks that hold it, FSDP unit, the
    axes that ZeRO shards it over with their number of ranks, and the gradients of a microbatch to each parameter."""

    size: int
    reduce_axes: Axes
    holders: tuple[int, ...]
    block: str
    zero_axes: Axes
    num_shards: int
    uses: Mapping[str, int]

    @property
    def shard(self) -> int:
        """Elements of a rank's shard, padding included."""
        return shard_numel(self.size, self.num_shards)


def flat_buffer_sizes(step: StepSpec) -> list[FlatBufferSize]:
    """Return the flat buffers: parameters with equal reductions share one of at least a bucket, or one per FSDP unit in
    ZeRO 3."""
    mesh, is_by_block = step.local.mesh, step.shards(3)
    others = tuple(axis for axis in mesh.names if axis != PIPELINE)
    least = math.inf if is_by_block else step.bucket_bytes / step.local.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str, Axes], list[tuple[str, int, int]]] = {}
    alike: dict[object, tuple[Axes, int, Axes, int]] = {}  # most layers differ in names alone
    for path, stage, spec in held_params(step):
        kind = spec.layout, spec.part_axes, spec.token_axes, tuple(part.padded_shape for part in spec.parts)
        if kind not in alike:
            shared, size = mesh.without(step.zero_axes, spec.axes), math.prod(spec.local_shape(mesh))
            alike[kind] = spec.reduce_axes(mesh), spec.num_copies(mesh, others), shared, size
        reduced, copies, shared, size = alike[kind]
        key = reduced, copies, spec.holders, stage, unit_of(path) if is_by_block else "", shared
        groups.setdefault(key, []).append((path, size, spec.uses))
    return [
        FlatBufferSize(
            sum(size for _, size, _ in run),
            key[0],
            key[2],
            key[4],
            key[5],
            mesh.size(key[5]),
            {path: uses for path, _, uses in run},
        )
        for key, params in groups.items()
        for run in _merge_small(params, least)
    ]


def _merge_small(params: Sequence[tuple[str, int, int]], least: float) -> list[list[tuple[str, int, int]]]:
    """Return runs of neighbours with at least `least` elements, merged from the end, where backward starts."""
    runs, held = [list[tuple[str, int, int]]()], 0
    for each in reversed(params):
        if held >= least:
            runs.append([])
            held = 0
        runs[-1].append(each)
        held += each[1]
    return runs


def unit_of(path: str) -> str:
    """Return the FSDP unit of a parameter: `layers.3`, `embedding`, ..."""
    return ".".join(path.split(".")[: 2 if path.startswith(("layers.", "mtp.")) else 1])


def held_params(step: StepSpec) -> Iterator[tuple[str, int, ParamSpec]]:
    """Yield path, stage and spec of each parameter of this rank."""
    for stage, specs in stage_specs(step.local.arch, step.local.mode, step.pipeline, step.coord).items():
        for path, spec in specs.items():
            yield path, stage, spec
