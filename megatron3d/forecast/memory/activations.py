"""Activations that a rank keeps from forward to backward of a microbatch: sums over the operations of its layers.

A module that is recomputed keeps what it reads (`kept_by`), a run of recomputed layers its input and what is found once
(choices of experts), an offloaded one nothing.  The load of experts is balanced or a multiple of that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron3d.model.local_sizes import LocalSizes, kind_counts
from megatron3d.model.operation import Operation, Stored, kept_by
from megatron3d.model.operations import (
    ahead_operations,
    document_tables,
    embedding_operations,
    head_operations,
    layer_operations,
)
from megatron3d.model.spec import NO_RECOMPUTE, LayerRun
from megatron3d.model.stage_plan import Stage


def total_bytes(items: Iterable[Stored]) -> int:
    """Return the bytes of all storages."""
    return sum(item.num_bytes for item in items)


def modules_of(local: LocalSizes) -> frozenset[str]:
    """Return the modules that each layer recomputes on its own."""
    return local.recompute.chosen


def _kept(operations: Sequence[Operation], modules: Collection[object] = ()) -> tuple[Stored, ...]:
    return tuple(stored for _, each in kept_by(operations, modules) for stored in each)


def layer_activations(local: LocalSizes) -> tuple[Stored, ...]:
    """Return the storages that a layer without full recomputation keeps."""
    return _kept(layer_operations(local), modules_of(local))


def run_activations(local: LocalSizes, run: LayerRun) -> int:
    """Return the bytes kept by a run of layers."""
    if run.is_offloaded or not run.layers:
        return 0
    if not run.is_recomputed:
        return _kept_in(local, run.layers)
    return local.residual + sum(
        count * total_bytes(stored for each in layer_operations(kind) for stored in each.once)
        for kind, count in local.by_kind(run.layers)
    )


def _kept_in(local: LocalSizes, layers: Iterable[int]) -> int:
    return sum(count * total_bytes(layer_activations(each)) for each, count in local.by_kind(layers))


def recomputed_activations(local: LocalSizes) -> int:
    """Return the most bytes of recomputed activations that exist while their backward runs.

    Offloaded activations count as well: those of the layer that is computed, and of the one that leaves or arrives.
    """
    whole, layers = local.recomputing(NO_RECOMPUTE), range(local.arch.num_layers)
    runs = (run.layers for run in local.recompute.runs(layers) if run.is_recomputed)
    # Most runs have as many layers of each kind as another.
    recomputed = {frozenset(kind_counts(local.arch, local.fp8, run).items()): run for run in runs}.values()
    kinds = [each for each, _ in local.by_kind(layers)]
    everything = [total_bytes(layer_activations(each.recomputing(NO_RECOMPUTE))) for each in kinds]
    kept = [total_bytes(layer_activations(each)) for each in kinds]
    if recomputed:
        again = max(_kept_in(whole, run) for run in recomputed) - local.residual
    else:
        again = max(size - left for size, left in zip(everything, kept, strict=True))
    if not local.recompute.offloads:
        return max(again, 0)
    transferred = local.residual if recomputed else max(kept)
    return max(again, *everything) + transferred


def embedding_activations(local: LocalSizes) -> tuple[Stored, ...]:
    """Return what the embedding and its dropout keep."""
    return _kept(embedding_operations(local))


def head_activations(local: LocalSizes) -> tuple[Stored, ...]:
    """Return what the final norm and the LM head keep."""
    return _kept(head_operations(local))


def deferred_wgrad_activations(local: LocalSizes) -> int:
    """Return the bytes that a layer keeps from dgrad to its deferred wgrad."""
    return sum(deferred_operands(local, each) for each in layer_operations(local))


def deferred_operands(local: LocalSizes, operation: Operation) -> int:
    """Return the bytes of X and dY of an operation's GEMMs, if their wgrad may be deferred."""
    gemms = operation.gemms if operation.is_deferred else ()
    grouped = round(sum(gemm.batch * gemm.m * (gemm.n + gemm.k) for gemm in gemms)) * local.itemsize
    return operation.operand_bytes + grouped


def num_ahead(local: LocalSizes, stage: Stage) -> int:
    """Return the modules of multi-token prediction in a stage."""
    return local.arch.mtp_num_layers if stage.has_head else 0


def ahead_activations(local: LocalSizes) -> int:
    """Return the bytes that multi-token prediction keeps: of each module embedding, norms and linears, layer, and head.

    With full recomputation a module keeps its two inputs only.
    """
    table, *masks = embedding_operations(local)
    head = head_operations(local)
    if local.recompute.recomputes_ahead:
        each = total_bytes(_kept([table])[:1]) + 2 * local.residual + total_bytes(_kept(head[1:]))
    else:
        rows = total_bytes(_kept([table])[:1])
        beside = [*masks, *ahead_operations(local), *head]
        each = rows + total_bytes(_kept(beside)) + total_bytes(layer_activations(local.layer_ahead))
    return local.arch.mtp_num_layers * each


def input_bytes(local: LocalSizes, stage: Stage) -> int:
    """Return the bytes that a stage keeps of its input where nothing in it does, and of what all its layers share."""
    first = next((run for run in local.recompute.runs(stage.layers) if run.layers), None)
    reader: Sequence[Stored] = head_activations(local) if stage.has_head else ()
    if first is not None:
        reader = () if first.is_offloaded else layer_activations(local)
    holds_input = (first and first.is_recomputed and not first.is_offloaded) or (reader and reader[0].what == "input")
    own = 0 if stage.has_embedding or holds_input else local.residual
    return own + (total_bytes(document_tables(local)) if stage.layers else 0)
