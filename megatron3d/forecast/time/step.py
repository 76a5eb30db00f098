"""Time of a training step: stages from layers, their simulated schedule, the exposed data axis, and the optimizer step.

step = schedule of the stages + exposed communication of the data axis + optimizer step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import ITEMSIZES, OptimizerConfig
from megatron3d.forecast.memory.step_spec import local_sizes
from megatron3d.forecast.time.breakdown import HOST, TimeBreakdown, TimePrediction, combine, exposed_time
from megatron3d.forecast.time.data_axis import (
    DataAxisTime,
    Interval,
    ParamCounts,
    ScheduleTimes,
    collectives_per_step,
    data_axis_time,
    exposed_gather_s,
    exposed_reduction_s,
    partly_exposed,
)
from megatron3d.forecast.time.hardware import (
    Accelerator,
    Cluster,
    Network,
    device_model,
    load_accelerator,
    load_cluster,
)
from megatron3d.forecast.time.layer import (
    LayerTimes,
    Machine,
    layer_times,
    times_of,
)
from megatron3d.forecast.time.practices import GRADIENTS, OURS, STAGES, WEIGHTS, ExecutionProfile
from megatron3d.forecast.time.update import quantization_s, update_s
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operations import ahead_operations, embedding_operations, head_operations
from megatron3d.model.spec import NO_RECOMPUTE
from megatron3d.model.stage_plan import Stage
from megatron3d.ops.plan import WHOLE_LOSS
from megatron3d.parallel.matmul_plan import crossing
from megatron3d.parallel.mesh import PIPELINE, Mesh
from megatron3d.pipeline.actions import ActionKind, Schedule
from megatron3d.pipeline.schedules import Pipeline, num_microbatches
from megatron3d.pipeline.simulate import StageTimes, execution_order, of_one_microbatch, times_of_order


def host_floor(times: LayerTimes, local: LocalSizes, machine: Machine, repeats: bool = False) -> LayerTimes:
    """Return a layer's times, none shorter than the host needs to launch its kernels.

    A forward is a third of them; `repeats` says whether the backward also recomputes the forward.
    """
    third_s = 1e-6 * _host_us(local, machine) / 3
    missing = [
        count * third_s - phase.total for phase, count in zip(times, (1, 1 + repeats, 1, 2 + repeats), strict=True)
    ]
    waits = [TimeBreakdown({HOST: seconds} if seconds > 0 else {}) for seconds in missing]
    return LayerTimes(*(phase.plus(wait) for phase, wait in zip(times, waits, strict=True)))


def _host_us(local: LocalSizes, machine: Machine) -> float:
    """Return the microseconds that the hosts of a tensor-parallel group need for a layer."""
    fitted, sizes = machine.profile.fitted, dict(local.mode.axes)
    others = math.prod(sizes.values()) - 1
    host_us = fitted.host_layer_us + others * fitted.host_tensor_us
    if others and machine.network.cluster.is_degraded:
        host_us += fitted.degraded_host_us + others * fitted.degraded_host_tensor_us
    return host_us * float(machine.network.num_nodes(local.mesh, tuple(sizes)) ** fitted.host_nodes)


def load_machine(cluster_name: str, precision: str, num_ranks: int, profile: ExecutionProfile = OURS) -> Machine:
    """Load a cluster and its accelerator as the machine of `num_ranks` ranks."""
    cluster = load_cluster(cluster_name)
    return make_machine(cluster, load_accelerator(cluster.accelerator), precision, num_ranks, profile)


def make_machine(
    cluster: Cluster, accelerator: Accelerator, precision: str, num_ranks: int, profile: ExecutionProfile = OURS
) -> Machine:
    """Return the machine of a cluster of accelerators; ranks that share CPU cores slow each other down."""
    slowdown = cluster.slowdown(num_ranks)
    accelerator = accelerator.today if profile.measured_rates else accelerator
    computes = device_model(accelerator, precision, ITEMSIZES[precision], slowdown)
    return Machine(replace(computes, fitted=profile.fitted), Network(cluster, slowdown, profile.fitted), profile)


def as_configured(machine: Machine, spec: RunSpec) -> Machine:
    """Return the machine with the kernels that a run uses, eager or compiled."""
    return machine.compiled() if spec.compiles(machine.on_gpu) else machine


def predict_time(spec: RunSpec, machine: Machine) -> TimePrediction:
    """Predict the step time of a valid run on a machine."""
    return step_time(simulated_step(spec, machine))


@dataclass(frozen=True)
class SimulatedStep:
    """The inputs of a step's simulation."""

    local: LocalSizes
    pipeline: Pipeline
    num_microbatches: int
    zero_stage: int
    bucket_bytes: float
    machine: Machine
    optimizer: OptimizerConfig
    shorter: Schedule | None = None

    @cached_property
    def held(self) -> ParamCounts:
        """Number of parameters that a rank holds."""
        return ParamCounts.of(self.local.arch, self.local.mode, self.mesh)

    @cached_property
    def stored(self) -> ParamCounts | None:
        """Number of those that are stored in fp8; None: none are."""
        local = self.local
        return ParamCounts.of(local.arch, local.mode, self.mesh, local.fp8) if local.stores_weights else None

    def stored_counts(self, stages: Sequence[Stage]) -> Mapping[tuple[str, ...], int]:
        """Return the number of weights of stages that a rank stores in fp8, by the axes that reduce their gradients."""
        return {} if self.stored is None else self.stored.on_rank(self.local.arch, stages)

    def param_counts(self, stages: Sequence[Stage]) -> Mapping[tuple[str, ...], int]:
        """Return the number of parameters of stages on a rank by the axes that reduce their gradients."""
        return self.held.on_rank(self.local.arch, stages)

    @property
    def mesh(self) -> Mesh:
        """Mesh of the run."""
        return self.local.mesh

    @property
    def waits_for_none(self) -> bool:
        """Whether ranks start their optimizer step without waiting for each other, so that the slowest rank decides."""
        schedule = self.pipeline.schedule
        return self.machine.profile.validates_later and any(
            kind is ActionKind.W for computations in of_one_microbatch(schedule) for _, kind in computations
        )


def simulated_step(spec: RunSpec, machine: Machine) -> SimulatedStep:
    """Return the simulation inputs of a valid run; of many microbatches only a few are simulated."""
    simulated, shorter = simulated_specs(spec)
    machine = as_configured(machine, spec)
    local = with_chunks(local_sizes(spec, machine.kernels_of(spec)), machine)
    return SimulatedStep(
        replace(local, defers_wgrads=simulated.pipeline.splits_backward),
        simulated.pipeline,
        spec.num_microbatches,
        spec.config.parallel.zero_stage,
        spec.bucket_bytes(machine.on_gpu),
        machine,
        spec.config.optimizer,
        shorter.schedule if shorter else None,
    )


def with_chunks(local: LocalSizes, machine: Machine) -> LocalSizes:
    """Return the sizes with the chunks of the loss that a machine's framework takes."""
    return local if machine.profile.chunks_loss else replace(local, loss_chunk=WHOLE_LOSS)


def simulated_specs(spec: RunSpec) -> tuple[RunSpec, RunSpec | None]:
    """Return the run with the microbatches to simulate, and one with a period of the schedule less.

    Further microbatches repeat the steady state if these are a multiple of the ranks, or a rank has one stage.
    """
    ranks, num = spec.mesh.sizes[PIPELINE], spec.num_microbatches
    virtual = 0 if spec.has_schedule_file else spec.num_virtual_stages
    is_steady = virtual == 1 or (virtual > 1 and num % ranks == 0)
    if num <= 4 * ranks or not is_steady:
        return spec, None
    count = 3 * ranks + num % ranks
    return spec.with_microbatches(count), spec.with_microbatches(count - ranks)


def step_time(step: SimulatedStep) -> TimePrediction:
    """Simulate a step and return its time."""
    durations = stage_times(step)
    ranks = range(step.pipeline.num_ranks)
    busy = _computations(step, durations)
    line = schedule_times(step, durations)
    worst = max(ranks, key=lambda rank: busy[rank].total)
    waits = max(exposed_data_axis(step, busy, line), key=lambda each: each.total)
    optimizer = max(_optimizer_s(step, rank) for rank in ranks)
    parts = busy[worst].plus(waits)
    bubble = max(0.0, line.total_s - busy[worst].total)
    whole_s = line.total_s + waits.total + optimizer
    late_s = whole_s * step.machine.profile.fitted.jitter * math.log2(step.mesh.size(step.mesh.zero))
    return TimePrediction(whole_s + late_s, parts, bubble + late_s, optimizer)


Durations = Mapping[tuple[int, ActionKind], TimeBreakdown]


def stage_times(step: SimulatedStep) -> Durations:
    """Return the seconds of each kind of computation of each stage, for one microbatch."""
    local, machine = step.local, step.machine
    kinds = {each.layer: _times_of_kind(each, machine) for each, _ in local.by_kind(range(local.arch.num_layers))}
    embedding, head = ends_times(local, machine)
    blocked = stage_transfer_time(step) if STAGES in machine.profile.alone else TimeBreakdown()
    found: dict[tuple[int, ActionKind], TimeBreakdown] = {}
    last = local.layer_ahead
    layer = (_times_of_kind(last, machine) if last.is_ahead else kinds[last.layer])[local.recompute.recomputes_ahead]
    ahead = times_of(ahead_operations(local), local, machine, is_recomputed=local.recompute.recomputes_ahead)
    module = layer, ahead, embedding, head
    for stage in step.pipeline.stages:
        ends = [embedding] * stage.has_embedding
        ends += [head, *module * local.arch.mtp_num_layers] * stage.has_head
        times = {
            kind: combine((own, *(end[place] for end in ends)))
            for place, (kind, own) in enumerate(_stage(local, stage, kinds).items())
        }
        for kind in (ActionKind.F, ActionKind.B, ActionKind.I):
            times[kind] = times[kind].plus(blocked)
        found |= {(stage.index, kind): each for kind, each in times.items()}
    return found


def ends_times(local: LocalSizes, machine: Machine) -> tuple[LayerTimes, LayerTimes]:
    """Return the times of the embedding, and of the LM head with the final norm and the loss."""
    return times_of(embedding_operations(local), local, machine), times_of(head_operations(local), local, machine)


def _times_of_kind(local: LocalSizes, machine: Machine) -> tuple[LayerTimes, LayerTimes]:
    """Return the times of a layer that keeps its activations, and of one that is recomputed."""
    full = local.recompute.granularity == "full"
    kept = local.recomputing(NO_RECOMPUTE) if full else local
    plain = host_floor(layer_times(kept, machine), local, machine)
    return plain, host_floor(layer_times(local, machine), local, machine, repeats=True) if full else plain


def _stage(
    local: LocalSizes, stage: Stage, kinds: Mapping[int, tuple[LayerTimes, LayerTimes]]
) -> dict[ActionKind, TimeBreakdown]:
    runs = local.recompute.runs(stage.layers)
    layers = [
        (kinds[each.layer][run.is_recomputed], count) for run in runs for each, count in local.by_kind(run.layers)
    ]
    actions = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)
    return {kind: combine(times[place].scaled(count) for times, count in layers) for place, kind in enumerate(actions)}


def stage_transfer_time(step: SimulatedStep) -> TimeBreakdown:
    """Return the time to send the residual stream to the next pipeline rank."""
    local, machine, mesh = step.local, step.machine, step.mesh
    if mesh.sizes[PIPELINE] == 1:
        return TimeBreakdown()
    copies = local.mode.copies if machine.profile.scatters_pipeline else ()
    sizes = local.num_tokens, local.arch.hidden_size, machine.device.itemsize
    calls = crossing(local.mode.residual, copies, mesh, *sizes)
    return combine(exposed_time(call.axes, machine.network.seconds(call, mesh)) for call in calls)


def schedule_times(step: SimulatedStep, durations: Durations) -> ScheduleTimes:
    """Simulate the schedule; the steady state of many microbatches is multiplied instead.

    A further microbatch takes at least the own work of the busiest rank: with unequal stages, the first periods still
    fill the queues before it and are shorter.
    """
    seconds = {key: times.total for key, times in durations.items()}
    hop = 0.0 if STAGES in step.machine.profile.alone else stage_transfer_time(step).total
    own = step.waits_for_none

    def simulated(schedule: Schedule) -> tuple[StageTimes, float]:
        order = execution_order(schedule)
        times = times_of_order(order, tuple(seconds[kind] for kind in order.kinds), hop)
        return times, times.cost if own else times.makespan

    times, total = simulated(step.pipeline.schedule)
    if step.shorter is not None:
        count = num_microbatches(step.pipeline.schedule)
        period_s = (total - simulated(step.shorter)[1]) / (count - num_microbatches(step.shorter))
        busiest_s = max(busy.total for busy in _computations(step, durations))
        total += (step.num_microbatches - count) * max(period_s, busiest_s / step.num_microbatches)
    spans = [{stage: Interval(*ends) for stage, ends in table.items()} for table in (times.firsts, times.lasts)]
    return ScheduleTimes(total, times.makespan, *spans)


def _computations(step: SimulatedStep, durations: Durations) -> Sequence[TimeBreakdown]:
    """Return each rank's computation of all microbatches."""
    each = of_one_microbatch(step.pipeline.schedule)
    return [combine(map(durations.__getitem__, kinds)).scaled(step.num_microbatches) for kinds in each]


def exposed_data_axis(
    step: SimulatedStep, busy: Sequence[TimeBreakdown], line: ScheduleTimes
) -> Iterator[TimeBreakdown]:
    """Yield the communication of each rank's data axis that is exposed after the schedule.

    Args:
        busy: computation of each rank.
    """
    m, zero = step.num_microbatches, step.zero_stage
    alone, tax = step.machine.profile.alone, step.machine.device.comm_tax
    alike: dict[object, DataAxisTime] = {}  # most stages differ in their index alone

    def of_stage(stage: Stage) -> DataAxisTime:
        if (kind := (len(stage.layers), stage.has_embedding, stage.has_head)) not in alike:
            counts, times, stored = (
                step.param_counts([stage]),
                collectives_per_step(zero, m),
                step.stored_counts([stage]),
            )
            alike[kind] = data_axis_time(counts, step.mesh, step.machine, zero, times, step.bucket_bytes, stored=stored)
        return alike[kind]

    for rank, computation in enumerate(busy):
        each = {stage.index: of_stage(stage) for stage in step.pipeline.on_rank(rank)}
        sums, gathers = combine(one.sums for one in each.values()), combine(one.gathers for one in each.values())
        steady = computation.total * (1 - 1 / m)  # all microbatches but one, with which their communication overlaps
        late = sums.total if GRADIENTS in alone else exposed_reduction_s(each, line, steady * (zero >= 2))
        early = gathers.total if WEIGHTS in alone else exposed_gather_s(each, line, steady * (zero == 3))
        yield partly_exposed(sums, late, tax).plus(partly_exposed(gathers, early, tax))


def _optimizer_s(step: SimulatedStep, rank: int) -> float:
    ranks, stages = step.mesh.size(step.mesh.zero) if step.zero_stage else 1, step.pipeline.on_rank(rank)
    mine, num_layers = sum(step.param_counts(stages).values()) / ranks, sum(len(stage.layers) for stage in stages)
    updated_s = update_s(step.local, num_layers, mine, ranks, step.machine, step.optimizer)
    return updated_s + quantization_s(step.local, sum(step.stored_counts(stages).values()), ranks, step.machine)
