"""Memory of one rank by category; of libraries next to it; and what another framework reserves.

    weights + master weights + gradients + optimizer + activations in flight + buffers + transient peak

One sweep over the operations of a step finds the most bytes that live (`sweep.py`); the transient peak is what they are
beyond the most activations in flight.  Outside torch's allocator there are the CUDA context and NCCL's communicators,
one per process group and direction of a link of the pipeline; the bytes of each stand in `hardware/*.yaml`.

Other frameworks reserve more, by terms that are fitted to published runs (`benchmarks/fit/fit_memory.py`):

    weights + gradients + optimizer + buffers + (activations + transient peak) x factor
    + logits x bytes + gathered inputs of linears x factor

They keep the logits of a whole microbatch, some a second copy of the gradients.  The memory of a gathered input cannot
be used again before the accelerator is done with it, so a host that launches ahead reserves one for each layer, as far
as there is memory: where the device has no more, torch's allocator waits for the accelerator and uses that again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from megatron3d.config.run_spec import RunSpec
from megatron3d.forecast.memory.activations import (
    ahead_activations,
    deferred_operands,
    deferred_wgrad_activations,
    embedding_activations,
    head_activations,
    input_bytes,
    num_ahead,
    run_activations,
    total_bytes,
)
from megatron3d.forecast.memory.flat_buffers import FlatBufferSize, flat_buffer_sizes, held_params
from megatron3d.forecast.memory.homes import home_state_bytes
from megatron3d.forecast.memory.step_spec import StepSpec, make_step_spec
from megatron3d.forecast.memory.sweep import Moment, Sweep
from megatron3d.forecast.time.hardware import KernelRates
from megatron3d.forecast.time.practices import OURS, ExecutionProfile
from megatron3d.linear.overlap_plan import async_plan
from megatron3d.model.local_sizes import KERNELS, KernelMemory, LocalSizes
from megatron3d.model.operations import ahead_operations, layer_operations, rotary_tables
from megatron3d.model.stage_plan import Stage
from megatron3d.optim.rule_spec import group_of
from megatron3d.parallel.mesh import PIPELINE, Axes
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.parallel.peers import NUM_COPIES, kept_by
from megatron3d.pipeline.actions import Action, ActionKind
from megatron3d.pipeline.actions import activations_in_flight as in_flight_after


def num_communicators(state: ParallelState) -> int:
    """Return the communicators of a rank: its groups of more than one rank, and two for each link, one a direction.

    None is of all ranks unless training needs one: numbers of all ranks are reduced over the others.
    """
    return len({axes for axes in state.group_axes if state.mesh.size(axes) > 1}) + 2 * len(state.my_links)


def library_bytes(state: ParallelState, rates: KernelRates) -> int:
    """Return the bytes of device memory that this rank's libraries hold outside torch's allocator."""
    return round((rates.context_gib + num_communicators(state) * rates.communicator_gib) * 2**30)


def symmetric_bytes(local: LocalSizes) -> int:
    """Return the bytes of symmetric memory through which GPUs of a node run collectives in rounds with a GEMM.

    Each group has one buffer, of its largest use: a shard that others read, or two parts of a product, of which one is
    computed while the other is read.
    """
    largest: dict[Axes, int] = {}
    for matmul in local.matmuls.values() if local.kernels.on_gpu and local.overlap.in_rounds else ():
        whole_x = matmul.x * local.mesh.size(matmul.plan.x)
        whole_y = matmul.y * local.mesh.size(matmul.plan.dy)
        rounds = async_plan(matmul.plan)
        uses = (rounds.x, whole_x), (rounds.dy, whole_y), (rounds.y, 2 * whole_y), (rounds.dx, 2 * whole_x)
        for move, size in uses:
            if move:
                part = size // local.mesh.size(move.axes) * local.itemsize
                largest[move.axes] = max(largest.get(move.axes, 0), part)
    return sum(largest.values())


def stage_activations(step: StepSpec, stage: Stage) -> int:
    """Return the bytes that one microbatch keeps in a stage from forward to backward."""
    local, runs = step.local, step.local.recompute.runs(stage.layers)
    embedding = embedding_activations(local) if stage.has_embedding else ()
    head = head_activations(local) if stage.has_head else ()
    ends = total_bytes((*embedding, *head)) + (ahead_activations(local) if stage.has_head else 0)
    return input_bytes(local, stage) + ends + sum(run_activations(local, run) for run in runs)


def in_flight(step: StepSpec) -> dict[int, float]:
    """Return the microbatches in flight in each stage of this rank when its activations peak.

    Between dgrad and wgrad, a split backward keeps the operands of wgrad, which count as a fraction of a microbatch.
    """
    held = _held_over_time(step, step.actions)
    until = step.actions[: 1 + held.index(max(held))]
    found = {}
    for index, (size, late) in _kept_bytes(step).items():
        *_, found[index] = 0.0, *in_flight_after((a for a in until if a.stage == index), late / max(size, 1))
    return found


def _kept_bytes(step: StepSpec) -> dict[int, tuple[int, int]]:
    """Return the bytes that a microbatch keeps in each stage until its dgrad, and from there to a deferred wgrad."""
    local, found = step.local, {}
    for stage in step.stages:
        late = sum(count * deferred_wgrad_activations(each) for each, count in local.by_kind(stage.layers))
        if ahead := num_ahead(local, stage):
            operations = [*layer_operations(local.layer_ahead), *ahead_operations(local)]
            late += ahead * sum(deferred_operands(local, each) for each in operations)
        found[stage.index] = stage_activations(step, stage), late
    return found


def _held_over_time(step: StepSpec, actions: Iterable[Action]) -> list[int]:
    """Return the bytes of activations after each action."""
    changes: dict[tuple[ActionKind, int], int] = {}
    for stage, (size, late) in _kept_bytes(step).items():
        of_kinds = {ActionKind.F: size, ActionKind.B: -size, ActionKind.I: late - size, ActionKind.W: -late}
        changes |= {(kind, stage): change for kind, change in of_kinds.items()}
    return list(accumulate(changes.get(each, 0) for each in map(itemgetter(0, 1), actions)))


# Of a microbatch: a token's index, in the batch and among its labels; again for each module that predicts ahead.
_TOKEN_BYTES = 2 * 8
# Its position in its document.
_DOCUMENT_BYTES = 8


@dataclass(frozen=True)
class RankMemory:
    """Bytes by category; the largest of `transient_peaks` counts, each beyond the most activations in flight."""

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
        self._step, self._flats = step, flat_buffer_sizes(step)

    @property
    def memory(self) -> RankMemory:
        """The memory."""
        activations = shards = 0
        most: dict[int, Moment] = {}  # those of equal operations differ in the bytes when they begin
        for each in Sweep(self._step, self._flats).moments(self._step.actions):
            if each.activations + each.shards > activations + shards:
                activations, shards = each.activations, each.shards
            found = most.setdefault(id(each.tops), each)
            if each.live > found.live:
                most[id(each.tops)] = each
        peaks: dict[str, int] = {}
        for each in most.values():
            for name, top in each.tops.items():
                peak = each.live + top - activations - shards
                peaks[name] = max(peaks.get(name, peak), peak)
        return self._with(activations, shards, peaks)

    @property
    def least_bytes(self) -> int:
        """A lower bound of its total: the state, and what microbatches keep between actions."""
        computations = self._step.pipeline.schedule[self._step.coord]
        return self._with(max(_held_over_time(self._step, computations)), 0, {}).total

    @cached_property
    def _optimizer(self) -> int:
        shards = (flat.held(self._step.local.mesh) for flat in self._flats)
        rules = ((group.rule, numel) for held in shards for group, numel in held.items())
        of_shards = sum(numel * self._step.state_bytes(rule) for rule, numel in rules)
        return of_shards + home_state_bytes(self._step, self._flats)

    def _with(self, activations: int, shards: int, peaks: Mapping[str, int]) -> RankMemory:
        """Return the memory with these bytes of activations, residual shards in transfer and peaks."""
        step, local = self._step, self._step.local
        is_narrow = local.itemsize < local.wide
        mine, whole = sum(flat.shard for flat in self._flats), sum(flat.whole for flat in self._flats)
        apart = (flat.shard for flat in self._flats if flat.blocks or is_narrow)
        return RankMemory(
            weights=sum(_weight_bytes(flat, step.shards(3), is_narrow) for flat in self._flats),
            main_weights=sum(apart) * local.wide,
            gradients=(mine if step.shards(2) else whole) * local.wide,
            optimizer=self._optimizer,
            activations=activations,
            buffers=shards + sum(buffers(step).values()),
            transient_peaks=peaks,
        )


def _weight_bytes(flat: FlatBufferSize, is_sharded: bool, is_narrow: bool) -> int:
    """Return the bytes of parameters between steps: sharded ones are the master weights, unless they are fp8."""
    if not is_sharded:
        return flat.whole * flat.itemsize + flat.table_bytes
    return flat.shard * flat.itemsize * (flat.blocks is not None or not is_narrow) + flat.table_bytes


def buffers(step: StepSpec) -> dict[str, int]:
    """Return the bytes of lasting buffers: tokens, rotary tables, a workspace.

    On a CPU the copy for asynchronous saves is one, too, and so are in-memory checkpoints.
    """
    local = step.local
    on_cpu = not local.kernels.on_gpu
    token_bytes = (1 + local.arch.mtp_num_layers) * _TOKEN_BYTES + _DOCUMENT_BYTES * local.resets_positions
    return {
        "tokens": step.num_microbatches * local.sequences_read * local.arch.seq_length * token_bytes,
        "rotary tables": total_bytes(rotary_tables(local)),
        "GEMM workspace": local.kernels.gemm_workspace + symmetric_bytes(local),
        "snapshot of a save": snapshot_bytes(step) if step.saves_in_background and on_cpu else 0,
        "in-memory checkpoints": in_memory_bytes(step) if step.saves_in_memory and on_cpu else 0,
    }


def snapshot_bytes(step: StepSpec) -> int:
    """Return the bytes that a rank copies for an asynchronous save: its share of master weights and optimizer state.

    Ranks that hold the same elements share them evenly, up to a row of each parameter.
    """
    mesh = step.local.mesh
    others = tuple(axis for axis in mesh.names if axis != PIPELINE)
    written = sum(
        math.prod(spec.local_shape(mesh))
        / (spec.num_copies(mesh, others) * len(spec.holders))
        * (step.local.wide + step.state_bytes(group_of(step.optimizer, path, spec).rule))
        for path, _, spec in held_params(step)
    )
    return round(written) + home_state_bytes(step, flat_buffer_sizes(step))


def in_memory_bytes(step: StepSpec) -> int:
    """Return the bytes of host memory of in-memory checkpoints: two copies of this rank's part, two of another's.

    Ranks are taken to be on hosts in their order.
    """
    mesh = step.local.mesh
    other = kept_by(mesh.rank, [""] * mesh.world_size)
    return NUM_COPIES * (snapshot_bytes(step) + snapshot_bytes(step.at(other)))


# A pipeline rank waits for the gradients of its first microbatch when it has launched the forwards of all in flight.
# Fitted to pipelines of 2 to 32 stages: as much as two of them are done by then.
_DONE = 2


def reserved_for(memory: RankMemory, step: StepSpec, profile: ExecutionProfile, most: float = math.inf) -> RankMemory:
    """Return the memory that is reserved for these tensors of a rank, gathered inputs within `most` bytes in all."""
    terms = profile.fitted
    of_logits = terms.logit_memory * num_logits(step) if terms.logit_memory else 0
    of_gathers = terms.gathered_memory * gathered_inputs(step) if terms.gathered_memory else 0
    peaks = {name: round(size * terms.activation_memory + of_logits) for name, size in memory.transient_peaks.items()}
    needed = replace(
        memory,
        gradients=memory.gradients + bucket_copies(memory, step, profile),
        activations=round(memory.activations * terms.activation_memory),
        transient_peaks=peaks,
    )
    of_gathers = min(of_gathers, max(most - needed.total, 0))
    return replace(needed, buffers=needed.buffers + int(of_gathers))


def bucket_copies(memory: RankMemory, step: StepSpec, profile: ExecutionProfile) -> int:
    """Return the bytes of buckets that hold the gradients a second time; none where no other rank has some."""
    is_reduced = step.local.mesh.size(step.local.mesh.zero) > 1
    return memory.weights // step.local.itemsize * profile.bucket_itemsize if is_reduced else 0


def num_logits(step: StepSpec) -> int:
    """Return the logits of a microbatch on this rank; none where no stage has the head."""
    local = step.local
    tokens, columns = local.mode.expand.on(local.mesh).y_layout
    size = local.part(local.num_tokens, tokens) * local.part(local.arch.padded_vocab_size, columns)
    return size if any(stage.has_head for stage in step.stages) else 0


def gathered_inputs(step: StepSpec) -> float:
    """Return the bytes of the gathered inputs of linears in all microbatches whose forward a host launches ahead.

    Without a pipeline that is one microbatch, in pipelines all in flight but two.
    """
    if step.local.mesh.sizes[PIPELINE] == 1:
        ahead = dict.fromkeys((stage.index for stage in step.stages), 1.0)
    else:
        ahead = {index: max(number - _DONE, 0.0) for index, number in in_flight(step).items()}
    kinds = ((ahead[stage.index], step.local.by_kind(stage.layers)) for stage in step.stages)
    return sum(number * sum(count * _gathered(each) for each, count in layers) for number, layers in kinds)


def _gathered(local: LocalSizes) -> int:
    """Return the bytes of the gathered inputs of a layer's linears."""
    sizes = ((matmul.x, local.mesh.size(matmul.plan.x)) for matmul in local.matmuls.values())
    return local.itemsize * sum(x * ranks for x, ranks in sizes if ranks > 1)


# Pipelines of at most this number of ranks are looked at in full.
FEW = 4


def largest_rank_memory(step: StepSpec, profile: ExecutionProfile = OURS, most: float = math.inf) -> RankMemory:
    """Return the memory of the pipeline rank that needs most, as a framework with this profile reserves it where
    there are `most` bytes."""
    each = (step.on_pipeline_rank(coord) for coord in candidates(step))
    return max((reserved_for(rank_memory(here), here, profile, most) for here in each), key=lambda memory: memory.total)


def fitting_rank_memory(step: StepSpec, most: float, profile: ExecutionProfile = OURS) -> RankMemory | None:
    """Return the memory of the pipeline rank that needs most, or None as soon as one is found that needs more bytes
    than `most`: the others are not looked at."""
    found: list[RankMemory] = []
    for coord in candidates(step):
        here = step.on_pipeline_rank(coord)
        rank = MemoryOfRank(here)
        if rank.least_bytes > most:  # no framework reserves less than the tensors
            return None
        found.append(reserved_for(rank.memory, here, profile, most))
        if found[-1].total > most:
            return None
    return max(found, key=lambda each: each.total)


def candidates(step: StepSpec) -> Sequence[int]:
    """Return the pipeline ranks among which one needs most: of those that hold alike stages, both ends and the middle.

    Along a pipeline, microbatches in flight fall, rise or stay; only what a rank holds can change the order.
    """
    num_ranks = step.pipeline.num_ranks
    if num_ranks <= FEW:
        return range(num_ranks)
    alike: dict[object, list[int]] = {}
    for coord in range(num_ranks):
        stages = step.on_pipeline_rank(coord).stages
        held = tuple((len(stage.layers), stage.has_embedding, stage.has_head) for stage in stages)
        alike.setdefault(held, []).append(coord)
    chosen = {coords[at] for coords in alike.values() for at in (0, len(coords) // 2, -1)}
    return sorted(chosen)
