"""Seconds of the optimizer step: of the bytes that it moves, then of whole matrices at their homes.

Their exchange overlaps with computation where there are several rounds of it, which is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megatron3d.config.schema import ITEMSIZES, OptimizerConfig
from megatron3d.forecast.time.layer import Machine
from megatron3d.linear.fp8_plan import LARGEST_BYTES
from megatron3d.model.fp8_workspaces import restored_itemsize
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.param_spec import param_specs
from megatron3d.model.spec import Architecture, pattern_length
from megatron3d.optim.rule_spec import EMA_BYTES, EMA_FLOPS, UpdateRule, group_of, rule_of
from megatron3d.parallel.home_plan import home_axes, matrix_numel
from megatron3d.parallel.matmul_plan import ring
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes.mode import Mode


class LayerMatrices(NamedTuple):
    """Matrices of a mean layer.

    Attributes:
        elements: of all, and `local` those on a rank.
        flops: of their update, of those that are not divided; `longest` of the longest of these.
        slab_flops: of a rank, of those that are divided among homes, and `grams` the elements that it sums with others.
    """

    elements: float
    local: float
    flops: float
    longest: float
    slab_flops: float
    grams: float


@cache
def layer_matrices(arch: Architecture, mode: Mode, mesh: Mesh, optimizer: OptimizerConfig) -> LayerMatrices:
    """Return what an optimizer computes on whole matrices of a layer, the mean of a pattern of layers."""
    rule, num_layers = rule_of(optimizer), pattern_length(arch)
    specs = param_specs(replace(arch, num_layers=num_layers), mode)
    inner = {path: spec for path, spec in specs.items() if path.startswith("layers.")}
    taken = [spec for path, spec in inner.items() if group_of(optimizer, path, spec).rule.needs_matrices]
    size, most = mesh.size(home_axes(mesh)), rule.max_home_elements(optimizer)
    parts = [
        (part, size > 1 and not spec.part_axes and matrix_numel(part) > most) for spec in taken for part in spec.parts
    ]
    flops = [rule.matrix_flops(part.shape, optimizer) for part, is_divided in parts if not is_divided]
    divided = [part.shape for part, is_divided in parts if is_divided]
    local = sum(math.prod(spec.local_shape(mesh)) for spec in taken)
    numbers = (
        sum(matrix_numel(part) for part, _ in parts),
        local,
        sum(flops),
        num_layers * max(flops, default=0.0),
        sum(rule.slab_flops(shape, optimizer, size) for shape in divided),
        sum(optimizer.muon_num_ns_steps * min(shape) ** 2 for shape in divided),
    )
    return LayerMatrices(*(number / num_layers for number in numbers))


def update_s(
    local: LocalSizes, num_layers: int, mine: float, shards: int, machine: Machine, optimizer: OptimizerConfig
) -> float:
    """Return the seconds of a rank's update.

    Args:
        num_layers: layers of its stages.
        mine: parameters that it updates: all of its own, or its part of as many ZeRO shards.
    """
    rule, device, mesh = rule_of(optimizer), machine.device, local.mesh
    if not rule.needs_matrices or rule.others is None:
        return _elementwise_s({rule: mine}, machine, optimizer)
    matrices = layer_matrices(local.arch, local.mode, mesh, optimizer)
    of_matrices = num_layers * matrices.local / shards
    seconds = _elementwise_s({rule: of_matrices, rule.others: mine - of_matrices}, machine, optimizer)
    axes, dtype = home_axes(mesh), rule.matrix_dtype(optimizer)
    itemsize = ITEMSIZES[dtype]
    at_home = max(num_layers * matrices.flops / mesh.size(axes), matrices.longest) if num_layers else 0.0
    at_home += num_layers * matrices.slab_flops
    is_fast = (dtype == "bf16" and not rule.computes_wide) or device.itemsize > 4
    seconds += device.matmul_bound_s(at_home) * (1 if is_fast else device.peak / device.plain_peak)
    moved = num_layers * matrices.elements / mesh.size(axes), of_matrices
    calls = [ring("all_to_all", axes, numel * itemsize, mesh) for numel in moved]
    calls += [ring("all_reduce", axes, num_layers * matrices.grams * itemsize, mesh)] if matrices.grams else []
    return seconds + sum(machine.network.seconds(call, mesh) for call in calls)


# Kernels that quantize a weight: zeros, cast and copy, twice; absolute values and the largest; scale, cast and copy.
_QUANTIZATION_KERNELS = 11


def quantization_s(local: LocalSizes, num_stored: float, shards: int, machine: Machine) -> float:
    """Return the seconds by which a rank quantizes its part of the weights that are stored in fp8, behind the update.

    Torch's operations do it: values of the network's dtype are made of master weights twice (`zero/fp8_shard.py`), with
    zeros, a cast and a copy; of the first ones absolute values and the largest of each block are found, the others are
    scaled, in fp32 unless bf16 is exact, and cast and copied as bytes.  Largest values are all-reduced in between.
    """
    if local.fp8 is None or not num_stored:
        return 0.0
    recipe, value, mesh = local.fp8.recipe, local.itemsize, local.mesh
    wide = restored_itemsize(local, recipe)
    values = value + (local.wide + value) + 2 * value
    widened = (value + wide) * (wide != value)
    rounded = widened + 2 * wide * (1 if recipe.has_powers else 2) + wide + 1 + 2  # without powers of 2 it is clamped
    blocks = num_stored / math.prod(size or math.inf for size in recipe.w)
    largest = ring("all_reduce", mesh.zero if shards > 1 else (), blocks * LARGEST_BYTES, mesh)
    moved_s = machine.device.memory_bound_s(
        num_stored / shards * (2 * values + 3 * value + rounded), _QUANTIZATION_KERNELS
    )
    return moved_s + (machine.network.seconds(largest, mesh) if largest.axes else 0.0)


def _elementwise_s(elements: Mapping[UpdateRule, float], machine: Machine, optimizer: OptimizerConfig) -> float:
    moved = sum(count * (machine.profile.optimizer_bytes + each.moved_bytes) for each, count in elements.items())
    flops = sum(count * each.flops for each, count in elements.items())
    if optimizer.ema_decay is not None:
        moved, flops = moved + EMA_BYTES * sum(elements.values()), flops + EMA_FLOPS * sum(elements.values())
    return max(machine.device.memory_bound_s(moved, 8), machine.device.matmul_bound_s(flops))
