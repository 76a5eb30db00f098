"""The process groups and point-to-point links that a training step of a model communicates over."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from megatron3d.attention.plan import latent_axes
from megatron3d.model.param_spec import param_specs, shares_embedding
from megatron3d.model.spec import Architecture, pattern_length
from megatron3d.model.stage_plan import StageAssignment
from megatron3d.ops.plan import dim_changes
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import DATA, PIPELINE, Axes, Link, Mesh, disjoint_cover
from megatron3d.parallel.modes.mode import Mode


def communication_axes(arch: Architecture, mode: Mode, mesh: Mesh) -> tuple[Axes, ...]:
    """Return every set of axes that a training step or the loading of a checkpoint communicates over.

    The order is the same on all ranks.  Some of them make up the whole mesh, each axis once: numbers of all ranks, such
    as the loss, are reduced over these one after another.
    """
    sets: list[Axes] = [(PIPELINE,)]
    for plan in (mode.expand, mode.contract, mode.embed, *((mode.latent,) if arch.is_latent else ())):
        sets += _plan_axes(plan.on(mesh))
    sets += [*latent_axes(mode.expand.on(mesh))] if arch.is_latent else []
    (_, features), (inner_tokens, inner_features) = mode.residual, mode.inner
    inner_features = mesh.nontrivial(inner_features)
    sets += [features, inner_tokens]
    sets += [inner_features[start:] for start in range(len(inner_features))]
    one_of_each = replace(arch, num_layers=min(arch.num_layers, pattern_length(arch)))
    specs = param_specs(one_of_each, mode).values()
    reduced = [spec.reduce_axes(mesh) for spec in specs]
    sets += [*reduced, mesh.zero, DATA[:1], *(mesh.without(axes, mesh.zero) for axes in reduced)]
    if arch.mtp_num_layers:
        there, back = dim_changes(mode.inner, mode.residual, mesh), dim_changes(mode.residual, mode.inner, mesh)
        sets += [change.gathered for change in (*there, *back)]
    sets += [mode.context, *((axis,) for axis in mode.context), (*DATA, *mode.context)] if mode.context else []
    if arch.experts is not None:
        shards = [mesh.without(mesh.zero, spec.axes) for spec in specs]
        copies = mesh.without((*DATA, *mode.context), (*mode.experts, *mode.etensor))
        sets += [(axis,) for axis in copies] if mode.pieces else []
        sets += [
            mode.experts,
            mode.etensor,
            *shards,
            mode.copies,
            tuple(axis for axis in mode.home if axis not in mode.batch_axes),
        ]
    unique = tuple(dict.fromkeys(live for axes in sets if (live := mesh.nontrivial(axes))))
    everything = mesh.nontrivial(mesh.names)
    has_cover = not everything or disjoint_cover(everything, unique)
    return unique if has_cover else tuple(dict.fromkeys((*unique, *((axis,) for axis in everything))))


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
