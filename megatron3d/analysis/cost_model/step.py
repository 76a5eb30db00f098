"""Time of a training step: stages from layers, their schedule from the simulator, then gradients and the optimizer.

step = schedule of the stages + what of the data axis is not hidden + update
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron3d.analysis.cost_model.breakdown import BUBBLE, UPDATE, Times, add, is_wait, waiting
from megatron3d.analysis.cost_model.data_axis import Exchange, Held, exchange, exposed, repeats
from megatron3d.analysis.cost_model.embedding_head import embedding_times, head_times
from megatron3d.analysis.cost_model.execution_profile import OURS, ExecutionProfile
from megatron3d.analysis.cost_model.hardware import Accelerator, Cluster, load_accelerator, load_cluster
from megatron3d.analysis.cost_model.kernels import device
from megatron3d.analysis.cost_model.layer import Machine, Phases, layer_phases
from megatron3d.analysis.cost_model.network import Network
from megatron3d.analysis.memory_model.local_sizes import KERNELS, Work
from megatron3d.analysis.memory_model.step_spec import ITEMSIZES
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.architecture import Architecture
from megatron3d.model.recompute_spec import KEEP_ALL
from megatron3d.model.stages import Stage
from megatron3d.parallel.matmul_plan import crossing
from megatron3d.parallel.mesh import Mesh
from megatron3d.pipeline.actions import Action, ActionKind, Schedule
from megatron3d.pipeline.schedules import num_microbatches
from megatron3d.pipeline.simulate import Span, Timeline, simulate_durations
from megatron3d.pipeline.spec import Pipeline


@dataclass(frozen=True)
class Prediction:
    """A step's time on the rank of the pipeline that is busiest.

    Attributes:
        step_s: all of it.
        parts: of one rank: computation by kind, waiting by axes.
        bubble_s: in which that rank waits for its pipeline.
        optimizer_s: of the update.
    """

    step_s: float
    parts: Times
    bubble_s: float
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of computation, the update not included."""
        return self.parts.compute

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of communication that nothing hides, by axes."""
        return {kind: seconds for kind, seconds in self.parts.items() if is_wait(kind)}

    @property
    def all_parts(self) -> Times:
        """Seconds by kind of all that the step consists of, the largest first."""
        parts = {**self.parts, BUBBLE: self.bubble_s, UPDATE: self.optimizer_s}
        return Times(sorted(parts.items(), key=lambda item: -item[1]))


def machine_of(cluster_name: str, precision: str, num_ranks: int, profile: ExecutionProfile = OURS) -> Machine:
    """The machine of a cluster."""
    cluster = load_cluster(cluster_name)
    return machine_with(cluster, load_accelerator(cluster.accelerator), precision, num_ranks, profile)


def machine_with(
    cluster: Cluster, accelerator: Accelerator, precision: str, num_ranks: int, profile: ExecutionProfile = OURS
) -> Machine:
    """The machine of a cluster of accelerators; where ranks share processors, each has its part of them."""
    slowdown = cluster.slowdown(num_ranks)
    computes = device(accelerator, precision, ITEMSIZES[precision], slowdown)
    return Machine(computes, Network(cluster, slowdown), profile)


@dataclass(frozen=True)
class Step:
    """What a step's time follows from."""

    work: Work
    pipeline: Pipeline
    num_microbatches: int
    zero_stage: int
    bucket_bytes: float
    machine: Machine
    shorter: Schedule | None = None

    @cached_property
    def held(self) -> Held:
        """Parameters of ranks."""
        return Held.of(self.arch, self.work.mode, self.mesh)

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.work.mesh

    @property
    def arch(self) -> Architecture:
        """The network."""
        return self.work.arch


def make_step(spec: RunSpec, machine: Machine) -> Step:
    """The step of a valid configuration, of whose steady microbatches a few are simulated."""
    train, zero_stage = spec.config.train, spec.config.parallel.zero_stage
    itemsize, kernels = ITEMSIZES[train.precision], KERNELS["gpu"]
    work = Work(
        spec.arch, spec.mode, spec.mesh, train.micro_batch_size, itemsize, spec.recompute, spec.overlap, kernels
    )
    simulated, shorter = simulated_specs(spec)
    rest = shorter.schedule if shorter else None
    bucket_bytes = train.bucket_mb * 2**20
    machine = machine.compiled() if train.compile else machine
    return Step(work, simulated.pipeline, spec.num_microbatches, zero_stage, bucket_bytes, machine, shorter=rest)


def simulated_specs(spec: RunSpec) -> tuple[RunSpec, RunSpec | None]:
    """Return the run with the microbatches that are worth simulating, and one with a period of the schedule less.

    What comes beyond is steady where they are a multiple of the ranks, or a rank has one stage.
    """
    ranks, num = spec.mesh.sizes["pipeline"], spec.num_microbatches
    virtual = 0 if spec.has_schedule_file else spec.num_virtual_stages
    is_steady = virtual == 1 or (virtual > 1 and num % ranks == 0)
    if num <= 4 * ranks or not is_steady:
        return spec, None
    count = 3 * ranks + num % ranks
    return spec.with_microbatches(count), spec.with_microbatches(count - ranks)


def predict(step: Step) -> Prediction:
    """The time of a step."""
    durations = stage_times(step)
    ranks = range(step.pipeline.num_ranks)
    busy = [_busy(step, durations, rank) for rank in ranks]
    line = timeline_of(step, durations)
    worst = max(ranks, key=lambda rank: busy[rank].total)
    waits = max((data_axis(step, durations, line, rank) for rank in ranks), key=lambda each: each.total)
    optimizer = max(_optimizer_s(step, rank) for rank in ranks)
    parts = busy[worst].plus(waits)
    bubble = max(0.0, line.total_s - busy[worst].total)
    return Prediction(line.total_s + waits.total + optimizer, parts, bubble, optimizer)


Durations = Mapping[tuple[int, ActionKind], Times]


def stage_times(step: Step) -> Durations:
    """Of each stage, each kind of computation of one microbatch."""
    work, machine, full = step.work, step.machine, step.work.recompute.granularity == "full"
    plain = layer_phases(replace(work, recompute=KEEP_ALL) if full else work, machine)
    again = layer_phases(work, machine) if full else plain
    embedding, head = embedding_times(work, machine), head_times(work, machine)
    blocked = Times() if machine.profile.overlaps_pipeline else crossing_times(step)
    found: dict[tuple[int, ActionKind], Times] = {}
    for stage in step.pipeline.stages:
        times = _stage(work, stage, plain, again)
        if stage.has_embedding:
            times[ActionKind.F] = times[ActionKind.F].plus(embedding[0])
            times |= {kind: times[kind].plus(embedding[1]) for kind in (ActionKind.B, ActionKind.W)}
        if stage.has_head:
            times[ActionKind.F] = times[ActionKind.F].plus(head)
        for kind in (ActionKind.F, ActionKind.B, ActionKind.I):
            times[kind] = times[kind].plus(blocked)
        found |= {(stage.index, kind): each for kind, each in times.items()}
    return found


def _stage(work: Work, stage: Stage, plain: Phases, again: Phases) -> dict[ActionKind, Times]:
    runs = work.recompute.runs(stage.layers)
    repeated = sum(len(run.layers) for run in runs if run.is_repeated)
    kinds = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)
    kept = len(stage.layers) - repeated
    return {
        kind: one.times(kept).plus(other.times(repeated)) for kind, one, other in zip(kinds, plain, again, strict=True)
    }


def crossing_times(step: Step) -> Times:
    """Of the residual stream from a stage to the next one on another rank."""
    work, machine, mesh = step.work, step.machine, step.mesh
    if mesh.sizes["pipeline"] == 1:
        return Times()
    copies = work.mode.copies if machine.profile.scatters_pipeline else ()
    size = machine.device.itemsize
    calls = crossing(work.mode.residual, copies, mesh, work.num_tokens, work.arch.hidden_size, size)
    return add(waiting(call.axes, machine.network.seconds(call, mesh)) for call in calls)


@dataclass(frozen=True)
class Line:
    """When the stages begin and end.

    Attributes:
        total_s: from the first start to the last end on any rank, for all microbatches.
        simulated_s: the same for those that are simulated.
        firsts, lasts: the first forward and the last backward of each stage, when they begin and end.
    """

    total_s: float
    simulated_s: float
    firsts: Mapping[int, Span]
    lasts: Mapping[int, Span]


def timeline_of(step: Step, durations: Durations) -> Line:
    """The schedule in seconds; of many microbatches, the steady ones are not simulated but multiplied."""
    seconds = {key: times.total for key, times in durations.items()}
    hop = crossing_times(step).total if step.machine.profile.overlaps_pipeline else 0.0

    def duration(action: Action) -> float:
        return seconds[action.stage, action.kind]

    def simulated(schedule: Schedule) -> Timeline:
        return simulate_durations(schedule, duration, hop)

    line, count = simulated(step.pipeline.schedule), num_microbatches(step.pipeline.schedule)
    total = makespan = line.makespan
    if step.shorter is not None:
        fewer = num_microbatches(step.shorter)
        total += (step.num_microbatches - count) * (makespan - simulated(step.shorter).makespan) / (count - fewer)
    firsts: dict[int, Span] = {}
    lasts: dict[int, Span] = {}
    for span in sorted(line.spans, key=lambda span: span.start):
        firsts.setdefault(span.action.stage, span)
        if span.action.kind in (ActionKind.B, ActionKind.W):
            lasts[span.action.stage] = span
    return Line(total, makespan, firsts, lasts)


def _busy(step: Step, durations: Durations, rank: int) -> Times:
    """A rank's computations of all microbatches."""
    return add(durations[action.stage, action.kind] for action in step.pipeline.schedule[rank] if action.mb == 0).times(
        step.num_microbatches
    )


def _counts(step: Step, stages: Sequence[Stage]) -> Mapping[tuple[str, ...], int]:
    return step.held.on_rank(step.arch, stages)


def data_axis(step: Step, durations: Durations, line: Line, rank: int) -> Times:
    """What a rank waits for along the data axis beyond the end of the schedule."""
    m, zero, profile, tax = step.num_microbatches, step.zero_stage, step.machine.profile, step.machine.device.comm_tax
    times = repeats(zero, m)
    each = {
        stage.index: exchange(_counts(step, [stage]), step.mesh, step.machine, zero, times, step.bucket_bytes)
        for stage in step.pipeline.on_rank(rank)
    }
    sums, gathers = add(one.sums for one in each.values()), add(one.gathers for one in each.values())
    steady = _steady_s(step, durations, rank)
    late = _late_s(each, line, steady * (zero >= 2)) if profile.overlaps_reduction else sums.total
    early = _early_s(each, line, steady * (zero == 3)) if profile.overlaps_gather else gathers.total
    return exposed(sums, late, tax).plus(exposed(gathers, early, tax))


def _late_s(each: Mapping[int, Exchange], line: Line, hidden_s: float) -> float:
    """How long after the last end sums go on: a stage's begin with its last backward and follow each other."""
    end = 0.0
    for stage in sorted(each, key=lambda stage: line.lasts[stage].start):
        last, found = line.lasts[stage], each[stage]
        rest = max(0.0, found.sums.total - hidden_s)
        end = max(max(end, last.start) + rest, last.end + min(found.tail_s, rest))
    return max(0.0, end - line.simulated_s)


def _early_s(each: Mapping[int, Exchange], line: Line, hidden_s: float) -> float:
    """How long stages wait for their weights, which are gathered in order and as layers need them."""
    end, late = 0.0, 0.0
    for stage in sorted(each, key=lambda stage: line.firsts[stage].start):
        end += max(0.0, each[stage].gathers.total - hidden_s)
        late = max(late, end - line.firsts[stage].end)
    return late


def _steady_s(step: Step, durations: Durations, rank: int) -> float:
    """Seconds of all microbatches but one on a rank, under which what is sent for each microbatch can hide."""
    return _busy(step, durations, rank).total * (1 - 1 / step.num_microbatches)


def _optimizer_s(step: Step, rank: int) -> float:
    ranks = step.mesh.sizes["data"] if step.zero_stage else 1
    mine = sum(_counts(step, step.pipeline.on_rank(rank)).values()) / ranks
    return step.machine.device.pass_s(mine * step.machine.profile.optimizer_bytes, 8)
