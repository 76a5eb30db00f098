"""Activations of a pipeline rank over its actions: microbatches in flight, and residual shards in transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import itemgetter

from megatron3d.analysis.memory_model.activations import (
    deferred_wgrad_activations,
    document_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    linear_operands,
    run_activations,
    total_bytes,
)
from megatron3d.analysis.memory_model.ahead_memory import ahead_activations, num_ahead
from megatron3d.analysis.memory_model.step_spec import StepSpec
from megatron3d.model.stages import Stage
from megatron3d.pipeline.actions import RECEIVES, SENDS, Action, ActionKind, stage_to_rank
from megatron3d.pipeline.actions import activations_in_flight as in_flight_after


def stage_activations(step: StepSpec, stage: Stage) -> int:
    """Return the bytes that one microbatch keeps in a stage from forward to backward."""
    local, runs = step.local, step.local.recompute.runs(stage.layers)
    embedding = embedding_activations(local) if stage.has_embedding else ()
    head = (*head_activations(local), *ahead_activations(local)) if stage.has_head else ()
    first = next((run for run in runs if run.layers), None)
    reader = head if first is None else () if first.is_offloaded else layer_activations(local)
    holds_input = (first and first.is_recomputed and not first.is_offloaded) or (reader and reader[0].what == "input")
    own_input = 0 if stage.has_embedding or holds_input else local.residual
    own_input += total_bytes(document_activations(local)) if stage.layers else 0
    return own_input + total_bytes(embedding) + sum(run_activations(local, run) for run in runs) + total_bytes(head)


def in_flight(step: StepSpec) -> dict[int, float]:
    """Return the microbatches in flight in each stage of this rank when its activations peak.

    Between dgrad and wgrad, a split backward keeps the operands of wgrad, which count as a fraction of a microbatch.
    """
    kept = {stage.index: _kept_bytes(step, stage) for stage in step.stages}
    held = _held_over_time(step.actions, kept)
    until = step.actions[: 1 + held.index(max(held))]
    found = {}
    for index, (size, late) in kept.items():
        *_, found[index] = 0.0, *in_flight_after((a for a in until if a.stage == index), late / max(size, 1))
    return found


def _kept_bytes(step: StepSpec, stage: Stage) -> tuple[int, int]:
    """Return the bytes that a microbatch keeps in a stage from forward to dgrad, and from there to a deferred wgrad."""
    local, ahead = step.local, num_ahead(step.local, stage)
    layers = [*stage.layers, *ahead * [local.arch.num_layers - 1]]
    late = sum(count * deferred_wgrad_activations(each) for each, count in local.by_kind(layers))
    return stage_activations(step, stage), late + ahead * linear_operands(local.mtp_matmuls, local)


def _held_over_time(actions: Iterable[Action], kept: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the bytes of activations after each action."""
    changes: dict[tuple[ActionKind, int], int] = {}
    for stage, (size, late) in kept.items():
        of_kinds = {ActionKind.F: size, ActionKind.B: -size, ActionKind.I: late - size, ActionKind.W: -late}
        changes |= {(kind, stage): change for kind, change in of_kinds.items()}
    return list(accumulate(changes.get(each, 0) for each in map(itemgetter(0, 1), actions)))


def peak_activations(step: StepSpec) -> tuple[int, int]:
    """Return the bytes of activations, and of residual shards in transfer, when their sum peaks."""
    held = _held_over_time(step.actions, {stage.index: _kept_bytes(step, stage) for stage in step.stages})
    size = step.local.residual
    return max(zip(held, (count * size for count in residual_shards(step)), strict=True), key=sum)


def most_kept(step: StepSpec) -> int:
    """Return the most bytes of activations, residual shards in transfer left out."""
    computations = step.pipeline.schedule[step.coord]
    return max(_held_over_time(computations, {stage.index: _kept_bytes(step, stage) for stage in step.stages}))


def residual_shards(step: StepSpec) -> list[int]:
    """Return the number of residual shards after each action: received, passed to the next stage, or in send."""
    where, most = stage_to_rank(step.pipeline.schedule), step.local.kernels.num_leaving
    actions = list(map(itemgetter(0, 1), step.actions))
    kinds = [Action(*kind) for kind in set(actions)]
    changes = {(each.kind, each.stage): _arrivals(each, where) - _consumed(each, len(where)) for each in kinds}
    lying = accumulate(map(changes.__getitem__, actions))
    sent = accumulate(kind in SENDS for kind, _ in actions)
    return [count + min(leaving, most) for count, leaving in zip(lying, sent, strict=True)]


def _arrivals(action: Action, where: Mapping[int, int]) -> int:
    """Return how many residual shards an action adds on this rank."""
    if action.kind in RECEIVES:
        return 1
    step = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}.get(action.kind)
    return int(step is not None and where.get(action.stage + step) == where[action.stage])


def _consumed(action: Action, num_stages: int) -> int:
    """Return how many residual shards an action consumes."""
    ends = {ActionKind.F: 0, ActionKind.B: num_stages - 1, ActionKind.I: num_stages - 1}
    return int(action.kind in ends and action.stage != ends[action.kind])
