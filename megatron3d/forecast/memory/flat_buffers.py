"""Flat buffers of a rank's parameters and gradients, as `zero/flat_buffer.py` makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.model.param_spec import stage_specs
from megatron3d.optim.rule_spec import GroupSpec, groups_of
from megatron3d.parallel.layout import ParamSpec, shard_numel
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh


class Param(NamedTuple):
    """A parameter of a rank, and its elements there."""

    path: str
    size: int
    spec: ParamSpec


class FlatBufferSize(NamedTuple):
    """Flat buffer of a rank.

    Attributes:
        size: elements of its parameters.
        reduce_axes: axes that reduce its gradients.
        holders: pipeline ranks that hold it.
        block: its FSDP unit.
        zero_axes: axes that ZeRO shards it over, of `num_shards` ranks.
        uses: gradients of a microbatch to each parameter.
        updated: elements by group, in the order in which it holds them.
        matrices: parameters of each group whose rule needs whole matrices.
    """

    size: int
    reduce_axes: Axes
    holders: tuple[int, ...]
    block: str
    zero_axes: Axes
    num_shards: int
    uses: Mapping[str, int]
    updated: Mapping[GroupSpec, int]
    matrices: Mapping[GroupSpec, Mapping[str, ParamSpec]]

    @property
    def shard(self) -> int:
        """Elements of a rank's shard, padding included."""
        return shard_numel(self.size, self.num_shards)

    def held(self, mesh: Mesh) -> dict[GroupSpec, int]:
        """Return the elements of a rank's shard by group; padding belongs to the last one."""
        low = mesh.index(self.zero_axes) * self.shard
        found, start = dict[GroupSpec, int](), 0
        for number, (group, size) in enumerate(self.updated.items(), 1):
            stop = start + size if number < len(self.updated) else self.shard * self.num_shards
            found[group] = max(min(stop, low + self.shard) - max(start, low), 0)
            start = stop
        return found


def flat_buffer_sizes(step: StepSpec) -> list[FlatBufferSize]:
    """Return the flat buffers: parameters with equal reductions share one of at least a bucket, or one per FSDP unit in
    ZeRO 3."""
    mesh, is_by_block = step.local.mesh, step.shards(3)
    others = tuple(axis for axis in mesh.names if axis != PIPELINE)
    least = math.inf if is_by_block else step.bucket_bytes / step.local.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str, Axes], list[Param]] = {}
    alike: dict[object, tuple[Axes, int, Axes, int]] = {}  # most layers differ in names alone
    for path, stage, spec in held_params(step):
        kind = spec.layout, spec.part_axes, spec.token_axes, tuple(part.padded_shape for part in spec.parts)
        if kind not in alike:
            shared, size = mesh.without(step.zero_axes, spec.axes), math.prod(spec.local_shape(mesh))
            alike[kind] = spec.reduce_axes(mesh), spec.num_copies(mesh, others), shared, size
        reduced, copies, shared, size = alike[kind]
        key = reduced, copies, spec.holders, stage, unit_of(path) if is_by_block else "", shared
        groups.setdefault(key, []).append(Param(path, size, spec))
    return [
        FlatBufferSize(
            sum(each.size for each in run),
            key[0],
            key[2],
            key[4],
            key[5],
            mesh.size(key[5]),
            {each.path: each.spec.uses for each in run},
            *_by_group(step, run),
        )
        for key, params in groups.items()
        for run in _merge_small(params, least)
    ]


def _by_group(
    step: StepSpec, run: Sequence[Param]
) -> tuple[dict[GroupSpec, int], dict[GroupSpec, Mapping[str, ParamSpec]]]:
    """Return the elements of each group, and the parameters of those whose rule needs whole matrices."""
    sizes = {each.path: each.size for each in run}
    updated, matrices = dict[GroupSpec, int](), dict[GroupSpec, dict[str, ParamSpec]]()
    specs = {each.path: each.spec for each in run}
    for path, group in groups_of(step.optimizer, specs).items():
        updated[group] = updated.get(group, 0) + sizes[path]
        if group.rule.needs_matrices:
            matrices.setdefault(group, {})[path] = specs[path]
    return updated, dict(matrices)


def _merge_small(params: Sequence[Param], least: float) -> list[list[Param]]:
    """Return runs of neighbours with at least `least` elements, merged from the end, where backward starts."""
    runs, held = [list[Param]()], 0
    for each in reversed(params):
        if held >= least:
            runs.append([])
            held = 0
        runs[-1].append(each)
        held += each.size
    return runs


def unit_of(path: str) -> str:
    """Return the FSDP unit of a parameter: `layers.3`, `embedding`, ..."""
    return ".".join(path.split(".")[: 2 if path.startswith(("layers.", "mtp.")) else 1])


def held_params(step: StepSpec) -> Iterator[tuple[str, int, ParamSpec]]:
    """Yield path, stage and spec of each parameter of this rank."""
    for stage, specs in stage_specs(step.local.arch, step.local.mode, step.pipeline, step.coord).items():
        for path, spec in specs.items():
            yield path, stage, spec
