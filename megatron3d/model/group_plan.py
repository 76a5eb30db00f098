"""The process groups and point-to-point links that a training step of a model communicates over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron3d.attention.plan import latent_axes
from megatron3d.linear.overlap_plan import TPOverlap, overlapped
from megatron3d.model.param_spec import param_specs, shares_embedding
from megatron3d.model.spec import Architecture, pattern_length
from megatron3d.model.stage_plan import StageAssignment
from megatron3d.ops.plan import dim_changes
from megatron3d.parallel.layout import ParamSpec
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import DATA, PIPELINE, Axes, Link, Mesh, disjoint_cover
from megatron3d.parallel.modes.mode import Mode


def communication_axes(arch: Architecture, mode: Mode, mesh: Mesh) -> tuple[Axes, ...]:
    """Return every set of axes that a training step or the loading of a checkpoint communicates over.

    The order is the same on all ranks.  Some of them make up the whole mesh, each axis once: numbers of all ranks, such
    as the loss, are reduced over these one after another.
    """
    sets: list[Axes] = [(PIPELINE,)]
    sets += [axes for plan in _plans(arch, mode, mesh) for axes in _plan_axes(plan)]
    sets += [*latent_axes(mode.expand.on(mesh))] if arch.is_latent else []
    (_, features), (inner_tokens, inner_features) = mode.residual, mode.inner
    inner_features = mesh.nontrivial(inner_features)
    sets += [features, inner_tokens]
    sets += [inner_features[start:] for start in range(len(inner_features))]
    specs = _specs(arch, mode)
    sets += _gradient_axes(specs, mesh)
    sets += _mtp_axes(mode, mesh) if arch.mtp_num_layers else []
    sets += [*_context_axes(mode), (*DATA, *mode.context)] if mode.context else []
    if arch.experts is not None:
        copies = mesh.without((*DATA, *mode.context), (*mode.experts, *mode.etensor))
        sets += [(axis,) for axis in copies] if mode.pieces else []
        sets += [mode.experts, mode.etensor, *_expert_shard_axes(specs, mesh), mode.copies]
        sets += [tuple(axis for axis in mode.home if axis not in mode.batch_axes)]
    unique = _unique(sets, mesh)
    everything = mesh.nontrivial(mesh.names)
    has_cover = not everything or disjoint_cover(everything, unique)
    return unique if has_cover else tuple(dict.fromkeys((*unique, *((axis,) for axis in everything))))


def exposed_axes(arch: Architecture, mode: Mode, mesh: Mesh, overlap: TPOverlap) -> tuple[Axes, ...]:
    """Return the sets of axes over which activations or weights move, and never during a computation.

    A collective over such a set may occupy as much of a device as it likes; sets for few numbers are left out.
    """
    plans = _plans(arch, mode, mesh)
    sets = [axes for plan in plans for axes in _plan_axes(plan)]
    busy = [move.axes for plan in plans for move in overlapped(plan, overlap)]
    busy += [move.axes for move in mode.expand.on(mesh).dx_moves]  # the LM head's, whose chunks always overlap
    specs = _specs(arch, mode)
    busy += [*_gradient_axes(specs, mesh), *_context_axes(mode)]
    sets += [*latent_axes(mode.expand.on(mesh))] if arch.is_latent else []
    sets += _mtp_axes(mode, mesh) if arch.mtp_num_layers else []
    if arch.experts is not None:
        sets += [mode.experts, mode.etensor, mode.copies]
        busy += [mode.experts] if arch.experts.shared_ffn_hidden_size else []
        busy += _expert_shard_axes(specs, mesh)
    hidden = _unique(busy, mesh)
    return tuple(axes for axes in _unique(sets, mesh) if axes not in hidden)


def _unique(sets: list[Axes], mesh: Mesh) -> tuple[Axes, ...]:
    return tuple(dict.fromkeys(live for axes in sets if (live := mesh.nontrivial(axes))))


def _plans(arch: Architecture, mode: Mode, mesh: Mesh) -> list[MatmulPlan]:
    plans = mode.expand, mode.contract, mode.embed, *((mode.latent,) if arch.is_latent else ())
    return [plan.on(mesh) for plan in plans]


def _specs(arch: Architecture, mode: Mode) -> list[ParamSpec]:
    one_of_each = replace(arch, num_layers=min(arch.num_layers, pattern_length(arch)))
    return list(param_specs(one_of_each, mode).values())


def _gradient_axes(specs: Sequence[ParamSpec], mesh: Mesh) -> list[Axes]:
    """Return the sets over which gradients are summed, during backward, and weights gathered, during forward."""
    reduced = [spec.reduce_axes(mesh) for spec in specs]
    return [*reduced, mesh.zero, DATA[:1], *(mesh.without(axes, mesh.zero) for axes in reduced)]


def _expert_shard_axes(specs: Sequence[ParamSpec], mesh: Mesh) -> list[Axes]:
    """Return the sets over which ZeRO shards parameters that data-parallel axes split already, as those of experts."""
    return [mesh.without(mesh.zero, spec.axes) for spec in specs]


def _context_axes(mode: Mode) -> list[Axes]:
    return [mode.context, *((axis,) for axis in mode.context)] if mode.context else []


def _mtp_axes(mode: Mode, mesh: Mesh) -> list[Axes]:
    there, back = dim_changes(mode.inner, mode.residual, mesh), dim_changes(mode.residual, mode.inner, mesh)
    return [change.gathered for change in (*there, *back)]


def _plan_axes(plan: MatmulPlan) -> list[Axes]:
    steps = [*moves(plan.x), *moves(plan.w), *moves(plan.y), *moves(plan.dy), *plan.dx_moves]
    return [step.axes for step in steps]


def pipeline_links(arch: Architecture, assignment: StageAssignment) -> tuple[Link, ...]:
    """Return all pairs of pipeline ranks that send to each other: the owners of neighbouring stages, and of the first
    and last stage of a model whose last stage uses the embedding matrix as well."""
    pairs = {(min(pair), max(pair)) for pair in pairwise(assignment.owners)}
    links = {Link(PIPELINE, low, high) for low, high in pairs if low < high}
    return tuple(sorted({*links, *tied_links(arch, assignment)}))


def tied_links(arch: Architecture, assignment: StageAssignment) -> tuple[Link, ...]:
    """Return the pair of pipeline ranks that sum the gradient of a shared embedding matrix, if there are two."""
    low, high = sorted((assignment.owners[0], assignment.owners[-1]))
    return (Link(PIPELINE, low, high),) if shares_embedding(arch) and low < high else ()
