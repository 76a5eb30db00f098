"""Search for the fastest layouts that fit: each gets a lower bound, and the most promising are predicted in full.

    bound = microbatches x (layers / pipeline ranks) x (forward + backward of a layer) x (1 + bubble of equal stages)
            + least slowdown of computation by communication over the data axis, even if that is fully overlapped

In the order of their bounds the step time of layouts is simulated, and the memory of those among the best is predicted,
until no bound is below the slowest of the layouts to return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron3d.analysis.cost_model.breakdown import TimePrediction
from megatron3d.analysis.cost_model.data_axis import ParamCounts
from megatron3d.analysis.cost_model.execution_profile import OURS, ExecutionProfile
from megatron3d.analysis.cost_model.layer import Machine
from megatron3d.analysis.cost_model.stage_division import divided_as
from megatron3d.analysis.cost_model.step import as_configured, load_machine, predict_time, simulated_specs
from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.libraries import library_bytes
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.pipeline_ranks import fitting_rank_memory, largest_rank_memory
from megatron3d.analysis.memory_model.rank import RankMemory
from megatron3d.analysis.memory_model.step_spec import make_step_spec
from megatron3d.analysis.planner.data_axis_bound import DataAxisBound, unfolded, with_few_experts
from megatron3d.analysis.planner.fixed_keys import NOTHING, FixedKeys
from megatron3d.analysis.planner.layout_bound import Bubbles, LayoutBound, PlainTimes
from megatron3d.analysis.planner.options import (
    RECOMPUTATIONS,
    ContextChoice,
    LayoutChoice,
    LayoutFields,
    PipelineShare,
    TensorChoice,
    context_choices,
    microbatch_sizes,
    pipelines,
    tensor_choices,
)
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import ITEMSIZES, Config
from megatron3d.config.validate.facts import Facts
from megatron3d.config.validate.rules import check, value_problems
from megatron3d.errors import UserError
from megatron3d.model.flops import flops_per_token
from megatron3d.model.recompute_spec import Recompute
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES

# Layouts that fit or are slower, and are predicted, at most, and the part of memory that is left to the allocator.
MOST, SPARE = 400, 0.08


@dataclass(frozen=True)
class PredictedLayout:
    """A layout with its step time, the memory of the rank that needs most, and what its libraries hold next to it."""

    layout: LayoutChoice
    config: Config
    step: TimePrediction
    memory: RankMemory
    library_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory of the rank that needs most."""
        return self.memory.total + self.library_bytes


@dataclass(frozen=True)
class SearchResult:
    """Fastest layouts in order, the number of layouts considered, and the reasons why others were refused."""

    plans: Sequence[PredictedLayout]
    num_layouts: int
    rejected: Counter[str]


@dataclass(frozen=True)
class PlanningProblem:
    """Model and global batch to plan for, the number of ranks, and the cluster.

    Attributes:
        profile: execution profile of the framework that trains.
        fixed: values that layouts must have.
        spare: fraction of memory that is left to the allocator and to errors of the prediction.
    """

    config: Config
    vocab_size: int
    cluster: str
    num_ranks: int
    profile: ExecutionProfile = OURS
    fixed: FixedKeys = NOTHING
    spare: float = SPARE

    @cached_property
    def machine(self) -> Machine:
        """The machine that the run is planned for, with its kernels."""
        machine = load_machine(self.cluster, self.config.train.precision, self.num_ranks, self.profile)
        return as_configured(machine, self.spec(self.config))

    @property
    def memory_bytes(self) -> float:
        """Bytes of a rank that tensors and libraries may use."""
        return self.machine.device.kernels.memory_gib * 2**30 * (1 - self.spare)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the network's dtype."""
        return ITEMSIZES[self.config.train.precision]

    def spec(self, config: Config) -> RunSpec:
        """Return the run of a configuration on these ranks with this vocabulary."""
        model = config.model.model_copy(update={"vocab_size": self.vocab_size})
        return divided_as(RunSpec(config.model_copy(update={"model": model}), self.num_ranks), self.profile)

    def plan(self, layout: LayoutChoice) -> PredictedLayout:
        """Predict a layout in full."""
        return self.predicted(layout, layout.apply_to(self.config))

    def predicted(self, layout: LayoutChoice, config: Config) -> PredictedLayout:
        """Predict a configuration in full."""
        spec = self.spec(config)
        return PredictedLayout(layout, config, self.step(spec), self.memory(spec), self.library_bytes(spec))

    def step(self, spec: RunSpec) -> TimePrediction:
        """Predict the time of a step."""
        return predict_time(spec, self.machine)

    def memory(self, spec: RunSpec) -> RankMemory:
        """Predict the memory of the rank that needs most."""
        simulated, _ = simulated_specs(spec)
        return largest_rank_memory(make_step_spec(simulated, KERNELS["gpu"]), self.profile.fitted)

    def fitting_memory(self, spec: RunSpec) -> RankMemory | None:
        """Predict the memory of the rank that needs most; None if a rank needs more than it may use."""
        simulated, _ = simulated_specs(spec)
        return fitting_rank_memory(make_step_spec(simulated, KERNELS["gpu"]), self.memory_bytes, self.profile.fitted)

    def library_bytes(self, spec: RunSpec) -> int:
        """Predict what libraries hold outside torch's allocator, on the pipeline rank with most links."""
        ranks = spec.mesh.ranks(("pipeline",))
        states = (spec.parallel_state.on_rank(rank) for rank in dict.fromkeys((*ranks[:2], *ranks[-2:])))
        return max(library_bytes(state, self.machine.device.kernels) for state in states)

    def tokens_per_s(self, plan: PredictedLayout) -> float:
        """Return the tokens per second of all ranks."""
        return self.config.train.global_batch_size * self.config.model.seq_length / plan.step.step_s

    def mfu(self, plan: PredictedLayout) -> float:
        """Return model FLOPs over the peak of all ranks."""
        flops = flops_per_token(self.spec(self.config).arch) * self.tokens_per_s(plan)
        return flops / (self.num_ranks * self.machine.device.peak)


class LowerBound(NamedTuple):
    """A lower bound of a layout's step time, and the layout's fields: most layouts are never looked at again."""

    seconds: float
    fields: LayoutFields

    @property
    def layout(self) -> LayoutChoice:
        """The layout."""
        return LayoutChoice(*self.fields)


def search(problem: PlanningProblem, count: int = 10, modes: Sequence[str] = tuple(MODES)) -> SearchResult:
    """Return the `count` fastest layouts of these modes that fit.

    Raises UserError where there is none, with the commonest reasons, or for values that every layout is refused for.
    """
    simplest = LayoutChoice(TensorChoice("1d", "replicated", (1,))).apply_to(problem.config)
    UserError.collect(list(value_problems(Facts(simplest, problem.num_ranks, problem.vocab_size))))
    rejected: Counter[str] = Counter()
    wanted = dict(problem.fixed.values).get("parallel.tensor_parallel_mode")
    modes = [mode for mode in modes if wanted in (None, mode)]
    bounds = sorted(_bounds(problem, rejected, modes), key=lambda bound: bound.seconds)
    plans: list[PredictedLayout] = []
    tried = 0
    for bound in bounds:
        worst = plans[count - 1].step.step_s if len(plans) == count else math.inf
        if tried >= MOST or bound.seconds > worst:
            break
        layout = bound.layout
        config = layout.apply_to(problem.config)
        if broken := check(config, problem.num_ranks, problem.vocab_size):
            rejected[_reason(broken[0])] += 1
            continue
        spec = problem.spec(config)
        step = problem.step(spec)
        if step.step_s >= worst:
            tried += 1
            continue
        memory = problem.fitting_memory(spec)
        if memory is None or memory.total + (libraries := problem.library_bytes(spec)) > problem.memory_bytes:
            rejected["needs more memory than a rank has"] += 1
            continue
        tried += 1
        plan = PredictedLayout(layout, config, step, memory, libraries)
        plans = sorted([*plans, plan], key=lambda each: each.step.step_s)[:count]
    if not plans:
        reasons = "; ".join(f"{reason} ({number} layouts)" for reason, number in rejected.most_common(3))
        raise UserError(
            f"--num-gpus {problem.num_ranks}: no layout of this model fits; use more GPUs, another "
            f"train.global_batch_size or a smaller model ({reasons})"
        )
    return SearchResult(plans, len(bounds) + rejected.total(), rejected)


def _reason(problem: str) -> str:
    """Return a message up to its colon without numbers, which many layouts have in common."""
    return problem.partition("=")[0] + ": " + problem.partition(": ")[2].partition(";")[0]


def _bounds(
    problem: PlanningProblem, rejected: Counter[str], modes: Sequence[str] = tuple(MODES)
) -> Iterator[LowerBound]:
    bubbles: Bubbles = {}
    arch, node = problem.spec(problem.config).arch, problem.machine.network.cluster.levels[0].ranks
    for tensor in tensor_choices(problem.num_ranks, modes):
        for context in context_choices(problem.num_ranks // tensor.size, arch, tensor, node):
            yield from _bounds_of(problem, tensor, context, bubbles, rejected)


def _bounds_of(
    problem: PlanningProblem, tensor: TensorChoice, context: ContextChoice, bubbles: Bubbles, rejected: Counter[str]
) -> Iterator[LowerBound]:
    config = problem.config
    broken = check(
        LayoutChoice(tensor, micro_batch_size=64, context=context).apply_to(_with_batch(config, problem, tensor)),
        problem.num_ranks,
    )
    if broken:
        rejected[_reason(broken[0])] += 1
        return
    spec = problem.spec(LayoutChoice(tensor, context=context).apply_to(config))
    arch, mode = unfolded(spec)
    mesh = Mesh((("pipeline", 1), ("replica", 1), ("data", 1), *mode.axes))
    held = ParamCounts.of(arch, mode, mesh)
    weights = arch.num_layers * sum(held.layer.values())
    reduced = held if arch == spec.arch else ParamCounts.of(with_few_experts(arch), mode, mesh)
    along_data = DataAxisBound(problem.machine, arch.num_layers, reduced, mesh)
    batch = config.train.global_batch_size
    rest = problem.num_ranks // (tensor.size * context.size)
    chunk = problem.spec(config).loss_chunk(problem.machine.on_gpu)
    shapes = list(pipelines(rest, arch.num_layers))
    by_ranks = {ranks: [shape for shape in shapes if shape[0] == ranks] for ranks, _, _ in shapes}
    for size in microbatch_sizes(batch):
        if size % mesh.size(mode.batch_axes):
            continue
        local = LocalSizes(arch, mode, mesh, size, problem.itemsize, kernels=KERNELS["gpu"])
        plain = PlainTimes.of(local, problem.machine, chunk)
        for granularity in RECOMPUTATIONS:
            here = replace(local, recompute=Recompute(granularity or "none"))
            cost = LayoutBound(problem.machine, plain, here, weights)
            for ranks, alike in by_ranks.items():
                num, left = divmod(batch, rest // ranks * size)
                if left:
                    continue
                for zero in range(4) if rest // ranks * context.size > 1 else (0,):
                    share = PipelineShare(ranks, rest // ranks, num, zero)
                    given = ((tensor, *shape, zero, size, granularity, context) for shape in alike)
                    allowed = [each for each in given if problem.fixed.allow(each)]
                    if len(allowed) < len(alike):
                        rejected["not as --fix says"] += len(alike) - len(allowed)
                    if allowed and cost.least_bytes(share) > problem.memory_bytes:
                        rejected["needs more memory than a rank has"] += len(allowed)
                        continue
                    waits_s = along_data.least_s(share)
                    for each in allowed:
                        yield LowerBound(cost.least_s(share, each[2], each[3], bubbles) + waits_s, each)


def _with_batch(config: Config, problem: PlanningProblem, tensor: TensorChoice) -> Config:
    """Return the configuration with a batch that no batch rule refuses, to check the rules of shapes alone."""
    size = 64 * (problem.num_ranks // tensor.size)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
