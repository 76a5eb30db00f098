"""The fastest layouts that fit: every one is bounded from below, the most promising are predicted in full.

    bound = microbatches x (layers / pipeline ranks) x (forward + backward of a layer) x (1 + bubble of equal stages)
            + what transfers along the data axis take from computation at least, however well they are hidden

In the order of their bounds, layouts get their step by simulation, and those that are among the best their memory by
closed form, until no bound is below the worst of those that are wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron3d.analysis.cost_model.data_axis import Held, exchange, repeats
from megatron3d.analysis.cost_model.embedding_head import head_times
from megatron3d.analysis.cost_model.execution_profile import OURS, ExecutionProfile
from megatron3d.analysis.cost_model.layer import Machine, layer_phases
from megatron3d.analysis.cost_model.step import Prediction, machine_of, make_step, predict, simulated_specs
from megatron3d.analysis.memory_model.activations import layer_activations, recomputed_activations, total
from megatron3d.analysis.memory_model.local_sizes import KERNELS, Work
from megatron3d.analysis.memory_model.rank import Memory, rank_memory
from megatron3d.analysis.memory_model.step_spec import ITEMSIZES, make_job
from megatron3d.analysis.planner.options import RECOMPUTATIONS, Layout, Tensor, micro_batches, pipelines, tensors
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.errors import UserError
from megatron3d.model.flops import flops_per_token
from megatron3d.model.recompute_spec import Recompute
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES, build_mode
from megatron3d.pipeline.action_costs import UNIT_COSTS
from megatron3d.pipeline.schedules import build_schedule
from megatron3d.pipeline.simulate import simulate

# Layouts that fit or are slower, and are predicted, at most, and the part of memory that is left to the allocator.
MOST, SPARE = 40, 0.06
# By pipeline ranks, schedule, virtual stages and microbatches: as a part of a microbatch's time on a rank.
Bubbles = dict[tuple[int, str, int, int], float]


@dataclass(frozen=True)
class Plan:
    """A layout with its step and the memory of the rank that needs most."""

    layout: Layout
    config: Config
    step: Prediction
    memory: Memory


@dataclass(frozen=True)
class Found:
    """The best layouts, the fastest first; how many there were, and why others were refused."""

    plans: Sequence[Plan]
    num_layouts: int
    rejected: Counter[str]


@dataclass(frozen=True)
class Problem:
    """A model and its batch on so many ranks of a cluster, by a program of these habits."""

    config: Config
    vocab_size: int
    cluster: str
    num_ranks: int
    profile: ExecutionProfile = OURS

    @cached_property
    def machine(self) -> Machine:
        """What it runs on."""
        return machine_of(self.cluster, self.config.train.precision, self.num_ranks, self.profile)

    @property
    def memory_bytes(self) -> float:
        """That tensors of a rank may need."""
        return self.machine.device.kernels.memory_gib * 2**30 * (1 - SPARE)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the network."""
        return ITEMSIZES[self.config.train.precision]

    def spec(self, config: Config) -> RunSpec:
        """Return the run of a configuration on these ranks with this vocabulary."""
        model = config.model.model_copy(update={"vocab_size": self.vocab_size})
        return RunSpec(config.model_copy(update={"model": model}), self.num_ranks)

    def plan(self, layout: Layout) -> Plan:
        """A layout in full."""
        return self.predicted(layout, layout.of(self.config))

    def predicted(self, layout: Layout, config: Config) -> Plan:
        """A configuration in full, whatever it says of its layout."""
        spec = self.spec(config)
        return Plan(layout, config, self.step(spec), self.memory(spec))

    def step(self, spec: RunSpec) -> Prediction:
        """Predict the time of a step."""
        return predict(make_step(spec, self.machine))

    def memory(self, spec: RunSpec) -> Memory:
        """Predict the memory of the rank that needs most."""
        simulated, _ = simulated_specs(spec)
        job = make_job(simulated, KERNELS["gpu"])
        ends = dict.fromkeys((0, job.pipeline.num_ranks - 1))
        return max((rank_memory(job.on_pipeline_rank(coord)) for coord in ends), key=lambda each: each.total)

    def tokens_per_s(self, plan: Plan) -> float:
        """Of all ranks."""
        return self.config.train.global_batch_size * self.config.model.seq_length / plan.step.step_s

    def mfu(self, plan: Plan) -> float:
        """Model operations over the peak of all ranks."""
        flops = flops_per_token(self.spec(self.config).arch) * self.tokens_per_s(plan)
        return flops / (self.num_ranks * self.machine.device.peak)


@dataclass(frozen=True)
class Bound:
    """A layout and the least that its step takes."""

    seconds: float
    layout: Layout


def search(problem: Problem, count: int = 10, modes: Sequence[str] = tuple(MODES)) -> Found:
    """The `count` fastest layouts of these modes that fit.

    Raises UserError where there is none, with the commonest reasons.
    """
    rejected: Counter[str] = Counter()
    bounds = sorted(_bounds(problem, rejected, modes), key=lambda bound: bound.seconds)
    plans: list[Plan] = []
    tried = 0
    for bound in bounds:
        worst = plans[count - 1].step.step_s if len(plans) == count else math.inf
        if tried >= MOST or bound.seconds > worst:
            break
        config = bound.layout.of(problem.config)
        if broken := check(config, problem.num_ranks, problem.vocab_size):
            rejected[_reason(broken[0])] += 1
            continue
        spec = problem.spec(config)
        step = problem.step(spec)
        if step.step_s >= worst:
            tried += 1
            continue
        plan = Plan(bound.layout, config, step, problem.memory(spec))
        if plan.memory.total > problem.memory_bytes:
            rejected["needs more memory than a rank has"] += 1
            continue
        tried += 1
        plans = sorted([*plans, plan], key=lambda each: each.step.step_s)[:count]
    if not plans:
        reasons = "; ".join(f"{reason} ({number} layouts)" for reason, number in rejected.most_common(3))
        raise UserError(
            f"--num-gpus {problem.num_ranks}: no layout of this model fits; use more GPUs, another "
            f"train.global_batch_size or a smaller model ({reasons})"
        )
    return Found(plans, len(bounds) + rejected.total(), rejected)


def _reason(problem: str) -> str:
    """A message without its numbers before the colon: what is common to many layouts."""
    return problem.partition("=")[0] + ": " + problem.partition(": ")[2].partition(";")[0]


def _bounds(problem: Problem, rejected: Counter[str], modes: Sequence[str] = tuple(MODES)) -> Iterator[Bound]:
    bubbles: Bubbles = {}
    for tensor in tensors(problem.num_ranks):
        if tensor.mode in modes or tensor.size == 1:
            yield from _bounds_of(problem, tensor, bubbles, rejected)


def _bounds_of(problem: Problem, tensor: Tensor, bubbles: Bubbles, rejected: Counter[str]) -> Iterator[Bound]:
    config, mode = problem.config, build_mode(tensor.mode, tensor.form, tensor.shape)
    broken = check(Layout(tensor, micro_batch_size=64).of(_with_batch(config, problem, tensor)), problem.num_ranks)
    if broken:
        rejected[_reason(broken[0])] += 1
        return
    arch = problem.spec(Layout(tensor).of(config)).arch
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes))
    held = Held.of(arch, mode, mesh)
    weights = arch.num_layers * sum(held.layer.values())
    along_data = _AlongData(problem, arch.num_layers, held, mesh)
    batch = config.train.global_batch_size
    rest = problem.num_ranks // tensor.size
    for size in micro_batches(batch):
        for granularity in RECOMPUTATIONS:
            work = Work(arch, mode, mesh, size, problem.itemsize, Recompute(granularity or "none"))
            if size % mesh.size(mode.batch_axes):
                continue
            cost = _Cost(problem, replace(work, kernels=KERNELS["gpu"]), weights)
            for ranks, schedule, virtual in pipelines(rest, arch.num_layers):
                data = rest // ranks
                if batch % (data * size):
                    continue
                num = batch // (data * size)
                for zero in range(4) if data > 1 else (0,):
                    layout = Layout(tensor, ranks, schedule, virtual, zero, size, granularity)
                    if cost.least_bytes(layout, data, num) > problem.memory_bytes:
                        rejected["needs more memory than a rank has"] += 1
                        continue
                    yield Bound(cost.least_s(layout, num, bubbles) + along_data.least_s(layout, data, num), layout)


def _with_batch(config: Config, problem: Problem, tensor: Tensor) -> Config:
    """With a batch that no rule of batches refuses, to ask for the rules of shapes alone."""
    size = 64 * (problem.num_ranks // tensor.size)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})


class _AlongData:
    """Least time that the data axis costs layouts of one tensor mode: its transfers keep units from computing."""

    def __init__(self, problem: Problem, num_layers: int, held: Held, mesh: Mesh) -> None:
        self._machine, self._num_layers, self._held, self._mesh = problem.machine, num_layers, held, mesh
        self._once: dict[tuple[int, bool], tuple[float, float]] = {}

    def least_s(self, layout: Layout, data: int, num: int) -> float:
        """Seconds of a step of so many microbatches, the two ends of the network left out."""
        key = layout.pipeline, layout.zero_stage > 0
        if key not in self._once:
            mesh = Mesh((("pipeline", layout.pipeline), ("replica", 1), ("data", data), *self._mesh.axes[3:]))
            counts = {axes: count * self._num_layers // layout.pipeline for axes, count in self._held.layer.items()}
            found = exchange(counts, mesh, self._machine, layout.zero_stage, (1, 1), math.inf)
            self._once[key] = found.sums.total, found.gathers.total
        sums_s, gathers_s = self._once[key]
        num_sums, num_gathers = repeats(layout.zero_stage, num)
        return self._machine.device.comm_tax * (num_sums * sums_s + num_gathers * gathers_s)


class _Cost:
    """Least time and memory of all layouts that share a tensor mode, a micro-batch and what is computed again."""

    def __init__(self, problem: Problem, work: Work, weights: int) -> None:
        self._work, self._weights = work, weights
        phases = layer_phases(work, problem.machine)
        self._layer_s = phases.forward.total + phases.backward.total
        self._head_s = head_times(work, problem.machine).total
        activations = total(layer_activations(work))
        is_full = work.recompute.granularity == "full"
        self._activations = work.residual if is_full else activations
        self._again = recomputed_activations(work) if is_full else 0

    def least_s(self, layout: Layout, num: int, bubbles: Bubbles) -> float:
        """Seconds of a step with equal stages whose communication over data and pipeline costs nothing."""
        few = min(num, 2 * layout.pipeline)
        key = layout.pipeline, layout.schedule, layout.virtual, few
        if key not in bubbles:
            schedule = build_schedule(layout.schedule, layout.pipeline, few, layout.virtual)
            bubbles[key] = simulate(schedule).makespan / UNIT_COSTS.total - few if layout.pipeline > 1 else 0.0
        stages = self._work.arch.num_layers * self._layer_s / layout.pipeline
        return max((num + bubbles[key]) * stages, num * (stages + self._head_s / layout.pipeline))

    def least_bytes(self, layout: Layout, data: int, num: int) -> float:
        """Of weights, gradients and optimizer of a rank, and of the activations of 1F1B's first rank."""
        size, wide, zero = self._work.itemsize, self._work.wide, layout.zero_stage
        main = 0 if size == wide else wide
        share = [1 / data if zero >= stage else 1 for stage in (1, 2, 3)]
        each = size * (share[2] if main else 1) + (main + 2 * wide) * share[0] + wide * share[1]
        held = self._activations * self._work.arch.num_layers * min(1, num / layout.pipeline)
        return each * self._weights / layout.pipeline + held + self._again
