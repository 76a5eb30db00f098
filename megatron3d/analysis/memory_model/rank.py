"""Memory of one rank by category, in closed form.

    weights + master weights + gradients + optimizer + activations in flight + buffers + largest transient peak

The sum is the peak of all tensors, give or take a layer's activations: the largest transient peak need not coincide
with most microbatches in flight.  What the allocator holds on top is not included; what libraries hold outside of it
is `libraries.py`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron3d.analysis.memory_model.activation_peaks import most_kept, peak_activations
from megatron3d.analysis.memory_model.activations import (
    layer_activations,
    rotary_tables,
    total_bytes,
)
from megatron3d.analysis.memory_model.ahead_memory import num_ahead
from megatron3d.analysis.memory_model.kernel_memory import KERNELS, KernelMemory
from megatron3d.analysis.memory_model.libraries import symmetric_bytes
from megatron3d.analysis.memory_model.step_end import step_end_peaks
from megatron3d.analysis.memory_model.step_spec import StepSpec, make_step_spec
from megatron3d.analysis.memory_model.transient_peaks import embedding_peak, head_peaks, layer_peaks
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.params import stage_specs
from megatron3d.parallel.layout import ParamSpec
from megatron3d.parallel.mesh import Axes

# Of a microbatch: a token's index, in the batch and among its labels; again for each module that predicts ahead.
_TOKEN_BYTES = 2 * 8
# Its position in its document.
_DOCUMENT_BYTES = 8


@dataclass(frozen=True)
class RankMemory:
    """Bytes by category; of `transient_peaks`, which do not coincide, only the largest counts."""

    weights: int
    main_weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    transient_peaks: Mapping[str, int]

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category name, as in metrics.jsonl; "moment" is the largest transient peak."""
        named = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)[:-1]}
        return named | {"moment": max(self.transient_peaks.values(), default=0)}

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return sum(self.categories.values())


def predict_memory(spec: RunSpec, kernels: KernelMemory = KERNELS["cpu"]) -> RankMemory:
    """Predict the memory of the rank that a valid run is seen from."""
    return rank_memory(make_step_spec(spec, kernels))


def rank_memory(step: StepSpec) -> RankMemory:
    """Return the memory of the rank that the step's mesh is seen from."""
    return MemoryOfRank(step).memory


class MemoryOfRank:
    """Memory of the rank that a step's mesh is seen from, and a lower bound that takes less to find."""

    def __init__(self, step: StepSpec) -> None:
        self._step, self._pieces = step, flat_buffer_sizes(step)
        self._buffers, self._transient_peaks = sum(buffers(step).values()), transient_peaks(step)

    @property
    def memory(self) -> RankMemory:
        """The memory."""
        return self._with_peak(*peak_activations(self._step))

    @property
    def least_bytes(self) -> int:
        """A lower bound of its total: without residual shards in transfer, which takes no lowering."""
        return self._with_peak(most_kept(self._step), 0).total

    def _with_peak(self, activations: int, shards: int) -> RankMemory:
        """Return the memory with these bytes of activations and of residual shards at their peak."""
        step, local = self._step, self._step.local
        is_narrow = local.itemsize < local.wide
        mine = sum(piece.shard for piece in self._pieces)
        whole = sum(piece.shard * piece.num_shards for piece in self._pieces)
        held = [(piece.size, piece.shard) for piece in self._pieces]
        between_steps = (0 if is_narrow else mine) if step.shards(3) else whole
        return RankMemory(
            weights=between_steps * local.itemsize,
            main_weights=mine * local.wide if is_narrow else 0,
            gradients=(mine if step.shards(2) else whole) * local.wide,
            optimizer=mine * sum(step.moment_itemsizes),
            activations=activations,
            buffers=shards + self._buffers,
            transient_peaks=self._transient_peaks | step_end_peaks(step, held, activations + shards),
        )


class FlatBufferSize(NamedTuple):
    """Flat buffer of a rank: elements, axes that reduce its gradients, pipeline ranks that hold it, FSDP unit, and the
    axes that ZeRO shards it over with their number of ranks."""

    size: int
    reduce_axes: Axes
    holders: tuple[int, ...]
    block: str
    zero_axes: Axes
    num_shards: int

    @property
    def shard(self) -> int:
        """Elements of a rank's shard, padding included."""
        return -(-self.size // self.num_shards)


def flat_buffer_sizes(step: StepSpec) -> list[FlatBufferSize]:
    """Return the flat buffers: parameters with equal reductions share one of at least a bucket, or one per FSDP unit in
    ZeRO 3."""
    mesh, is_by_block = step.local.mesh, step.shards(3)
    others = tuple(axis for axis in mesh.names if axis != "pipeline")
    least = math.inf if is_by_block else step.bucket_bytes / step.local.wide
    groups: dict[tuple[Axes, int, tuple[int, ...], int, str, Axes], list[int]] = {}
    alike: dict[object, tuple[Axes, int, Axes, int]] = {}  # most layers differ in names alone
    for block, stage, spec in _params(step):
        kind = spec.layout, spec.part_axes, spec.token_axes, tuple(part.padded_shape for part in spec.parts)
        if kind not in alike:
            shared, size = mesh.without(step.zero_axes, spec.axes), math.prod(spec.local_shape(mesh))
            alike[kind] = spec.reduce_axes(mesh), spec.num_copies(mesh, others), shared, size
        reduced, copies, shared, size = alike[kind]
        key = reduced, copies, spec.holders, stage, block if is_by_block else "", shared
        groups.setdefault(key, []).append(size)
    return [
        FlatBufferSize(size, key[0], key[2], key[4], key[5], mesh.size(key[5]))
        for key, sizes in groups.items()
        for size in _merge_small(sizes, least)
    ]


def _merge_small(sizes: list[int], least: float) -> list[int]:
    """Return sums of neighbouring sizes of at least `least`, merged from the end, where backward starts."""
    sums = [0]
    for size in reversed(sizes):
        sums = [*sums, size] if sums[-1] >= least else [*sums[:-1], sums[-1] + size]
    return sums


def _params(step: StepSpec) -> Iterator[tuple[str, int, ParamSpec]]:
    """Yield FSDP unit (`layers.3`, `embedding`, ...), stage and spec of each parameter of this rank."""
    for stage, specs in stage_specs(step.local.arch, step.local.mode, step.pipeline, step.coord).items():
        for path, spec in specs.items():
            yield ".".join(path.split(".")[: 2 if path.startswith(("layers.", "mtp.")) else 1]), stage, spec


def buffers(step: StepSpec) -> dict[str, int]:
    """Return the bytes of lasting buffers: tokens, rotary tables, kept weights, two gathered FSDP units, a workspace.

    On a CPU the copy for asynchronous saves is one, too.
    """
    local = step.local
    token_bytes = (1 + local.arch.mtp_num_layers) * _TOKEN_BYTES + _DOCUMENT_BYTES * local.resets_positions
    blocks = Counter[str]()
    for block, _, spec in _params(step) if step.shards(3) else ():
        blocks[block] += math.prod(spec.local_shape(local.mesh))
    return {
        "tokens": step.num_microbatches * local.sequences_read * local.arch.seq_length * token_bytes,
        "rotary tables": total_bytes(rotary_tables(local)),
        "gathered weights": gathered_weights(step),
        "whole blocks": _largest(2, blocks.values()) * local.itemsize,
        "GEMM workspace": local.kernels.gemm_workspace + symmetric_bytes(local),
        "snapshot of a save": snapshot_bytes(step) if step.saves_in_background and local.kernels.is_host else 0,
    }


def snapshot_bytes(step: StepSpec) -> int:
    """Return the bytes that a rank copies for an asynchronous save: its share of master weights and moments.

    Ranks that hold the same elements share them evenly, up to a row of each parameter.
    """
    mesh = step.local.mesh
    others = tuple(axis for axis in mesh.names if axis != "pipeline")
    written = sum(
        math.prod(spec.local_shape(mesh)) / (spec.num_copies(mesh, others) * len(spec.holders))
        for _, _, spec in _params(step)
    )
    return round(written) * (step.local.wide + sum(step.moment_itemsizes))


def gathered_weights(step: StepSpec) -> int:
    """Return the bytes of gathered weights that are kept from forward to backward."""
    if not step.local.overlap.keep_gathered_weights:
        return 0
    ahead = sum(num_ahead(step.local, stage) for stage in step.stages)
    layers = [layer for stage in step.stages for layer in stage.layers] + ahead * [step.local.arch.num_layers - 1]
    tables = [(each.matmuls, count) for each, count in step.local.by_kind(layers)] + [(step.local.mtp_matmuls, ahead)]
    elements = sum(n * matmul.whole_w for table, n in tables for matmul in table.values() if matmul.plan.w)
    return elements * step.local.itemsize


def _largest(count: int, sizes: Iterable[int]) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


def transient_peaks(step: StepSpec) -> dict[str, int]:
    """Return the bytes of every transient peak on this rank by its name.

    Sharded gradients are whole at times: two buckets while they are reduced, those received, and during the backward of
    earlier layers, when at least one layer has freed its activations, a third one that is being filled.
    """
    local, stages = step.local, step.stages
    is_ahead = any(num_ahead(local, stage) for stage in stages)
    found = layer_peaks(local) if is_ahead or any(stage.layers for stage in stages) else {}
    if is_ahead or any(stage.has_embedding for stage in stages):
        found["backward of the embedding"] = embedding_peak(local)
    if any(stage.has_head for stage in stages):
        found |= head_peaks(step)
    if step.shards(2):
        sizes = [piece.size for piece in flat_buffer_sizes(step)]
        third = _largest(3, sizes) - _largest(2, sizes)
        freed = min(total_bytes(layer_activations(each)) for each, _ in local.by_kind(range(local.arch.num_layers)))
        filled = max(third * local.wide - freed, 0)
        reduced = (_largest(2, sizes) + _largest(local.kernels.num_received, sizes)) * local.wide
        found = {name: size + reduced + filled for name, size in found.items()}
    return found
