"""Flat buffers of a rank's parameters and gradients, as `zero/flat_buffer.py` makes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron3d.forecast.memory.step_spec import StepSpec
from megatron3d.linear.fp8_plan import LARGEST_BYTES, blocks_of_weight, reduced_axes
from megatron3d.model.linear_spec import EXPERT_LINEARS, linear_of
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.param_spec import stage_specs
from megatron3d.optim.rule_spec import GroupSpec, groups_of
from megatron3d.parallel.layout import ParamSpec, shard_numel
from megatron3d.parallel.mesh import PIPELINE, Axes, Mesh


class Fp8Blocks(NamedTuple):
    """Weights of a rank that are stored in fp8.

    Attributes:
        num_blocks: blocks that they consist of.
        split_by: how many of these have their largest values reduced over the axes that split them.
        piece: most elements that are quantized at once: of a weight, or of one of its matrices.
    """

    num_blocks: int
    split_by: Mapping[Axes, int]
    piece: int


class Param(NamedTuple):
    """A parameter of a rank, and its elements there; `blocks`: of a weight that is stored in fp8."""

    path: str
    size: int
    spec: ParamSpec
    blocks: Fp8Blocks | None


class FlatBufferSize(NamedTuple):
    """Flat buffer of a rank.

    Attributes:
        size: elements of its parameters.
        reduce_axes: axes that reduce its gradients.
        holders: pipeline ranks that hold it.
        block: its FSDP unit.
        zero_axes: axes that ZeRO shards it over, of `num_shards` ranks.
        uses: gradients of a microbatch to each parameter.
        itemsize: bytes of an element of its parameters; master weights of fp8 ones are apart in every precision.
        blocks: of weights that are stored in fp8; None: it has none.
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
    itemsize: int
    blocks: Fp8Blocks | None
    updated: Mapping[GroupSpec, int]
    matrices: Mapping[GroupSpec, Mapping[str, ParamSpec]]

    @property
    def shard(self) -> int:
        """Elements of a rank's shard, padding included."""
        return shard_numel(self.size, self.num_shards)

    @property
    def whole(self) -> int:
        """Elements of all shards."""
        return self.shard * self.num_shards

    @property
    def table_bytes(self) -> int:
        """Bytes of the scales of blocks, and of the largest values that these are made of."""
        return 0 if self.blocks is None else 2 * LARGEST_BYTES * self.blocks.num_blocks

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
    ZeRO 3; weights that are stored in fp8 have some of their own."""
    mesh, is_by_block = step.local.mesh, step.shards(3)
    others = tuple(axis for axis in mesh.names if axis != PIPELINE)
    least = math.inf if is_by_block else step.bucket_bytes / step.local.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str, Axes, bool], list[Param]] = {}
    alike: dict[object, tuple[Axes, int, Axes, int, Fp8Blocks | None]] = {}  # most layers differ in names alone
    for path, stage, spec in held_params(step):
        count = matrices_in_fp8(step.local, path)
        kind = spec.layout, spec.part_axes, spec.token_axes, tuple(part.padded_shape for part in spec.parts), count
        if kind not in alike:
            shared, size = mesh.without(step.zero_axes, spec.axes), math.prod(spec.local_shape(mesh))
            blocks = _blocks(step.local, spec, count) if count else None
            alike[kind] = spec.reduce_axes(mesh), spec.num_copies(mesh, others), shared, size, blocks
        reduced, copies, shared, size, blocks = alike[kind]
        key = reduced, copies, spec.holders, stage, unit_of(path) if is_by_block else "", shared, count > 0
        groups.setdefault(key, []).append(Param(path, size, spec, blocks))
    return [
        FlatBufferSize(
            sum(each.size for each in run),
            key[0],
            key[2],
            key[4],
            key[5],
            mesh.size(key[5]),
            {each.path: each.spec.uses for each in run},
            1 if key[6] else step.local.itemsize,
            _all_blocks([each.blocks for each in run if each.blocks is not None]),
            *_by_group(step, run),
        )
        for key, params in groups.items()
        for run in _merge_small(params, least)
    ]


def matrices_in_fp8(local: LocalSizes, path: str) -> int:
    """Return the matrices of a rank's weight that is stored in fp8, several of experts; 0: the parameter is not."""
    fp8, linear = local.fp8, linear_of(path) if local.stores_weights else None
    if fp8 is None or linear is None or not fp8.takes(path.removesuffix(".weight")):
        return 0
    experts = local.arch.experts if linear in EXPERT_LINEARS else None
    return 1 if experts is None else experts.num_experts // local.mesh.size(local.mode.experts)


def _blocks(local: LocalSizes, spec: ParamSpec, num_matrices: int) -> Fp8Blocks:
    """Return the blocks of a weight that is stored in fp8."""
    assert local.fp8 is not None, "weights are stored in fp8"
    recipe, (rows, features) = local.fp8.recipe, spec.local_shape(local.mesh)
    count, axes = (
        blocks_of_weight(recipe, rows, features, num_matrices),
        reduced_axes(recipe.w, spec.layout, local.mesh),
    )
    together = 1 if recipe.block else num_matrices
    return Fp8Blocks(count, {axes: count} if axes else {}, rows * features // together)


def _all_blocks(found: Sequence[Fp8Blocks]) -> Fp8Blocks | None:
    """Return the blocks of several weights; None of none."""
    split_by = Counter[Axes]()
    for each in found:
        split_by.update(each.split_by)
    count, longest = sum(each.num_blocks for each in found), max((each.piece for each in found), default=0)
    return Fp8Blocks(count, split_by, longest) if found else None


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
