"""Lower bounds of the step times of all layouts that the planner can choose, in their order.

A bubble takes a simulation.  Layouts that differ in their schedule alone are a group with a bound for any schedule, and
get bounds of their own when that of the group is the lowest left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from megatron3d.analysis.cost_model.data_axis import ParamCounts
from megatron3d.analysis.memory_model.expert_memory import expected_load
from megatron3d.analysis.memory_model.kernel_memory import KERNELS
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.planner.data_axis_bound import DataAxisBound, fewest_ranks, with_few_experts
from megatron3d.analysis.planner.layout_bound import Bubbles, LayoutBound, PlainTimes
from megatron3d.analysis.planner.options import (
    RECOMPUTATIONS,
    TOGETHER,
    ContextChoice,
    ExpertChoice,
    LayoutChoice,
    LayoutFields,
    PipelineShape,
    PipelineShare,
    TensorChoice,
    context_choices,
    expert_choices,
    microbatch_sizes,
    pipelines,
    tensor_choices,
)
from megatron3d.analysis.planner.problem import PlanningProblem
from megatron3d.config.model_defaults import token_dispatcher
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.model.recompute_spec import Recompute
from megatron3d.parallel.expert_ranks import stage_axes
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes import MODES


class LowerBound(NamedTuple):
    """A lower bound of a layout's step time, and the layout's fields: most layouts are never looked at again."""

    seconds: float
    fields: LayoutFields

    @property
    def layout(self) -> LayoutChoice:
        """The layout."""
        return LayoutChoice(*self.fields)


class LayoutGroup(NamedTuple):
    """Layouts that differ in their schedule alone: a bound for any of them, and how each gets its own.

    Attributes:
        shapes: ranks, schedule and stages per rank of each pipeline.
        others: the fields of a layout behind those.
    """

    seconds: float
    cost: LayoutBound
    share: PipelineShare
    waits_s: float
    tensor: TensorChoice
    shapes: Sequence[PipelineShape]
    others: tuple[int, int, str | None, ContextChoice, ExpertChoice]

    def bounds(self, bubbles: Bubbles) -> Iterator[LowerBound]:
        """Yield the bound of each layout."""
        for shape in self.shapes:
            seconds = self.cost.least_s(self.share, bubbles.of(self.share, *shape[1:])) + self.waits_s
            yield LowerBound(seconds, (self.tensor, *shape, *self.others))


# Of the bound of a group: bubbles of 0 may be less than that by rounding.
_ROUNDING = 1 - 1e-9


def in_order(groups: Sequence[LayoutGroup]) -> Iterator[LowerBound]:
    """Yield the bounds of all layouts from the lowest; those of equal bounds in the order of their groups."""
    bubbles, opened = Bubbles(), list[tuple[float, int, int, LowerBound]]()
    for place in sorted(range(len(groups)), key=lambda place: groups[place].seconds):
        while opened and opened[0][0] < groups[place].seconds:
            yield heappop(opened)[-1]
        for index, bound in enumerate(groups[place].bounds(bubbles)):
            heappush(opened, (bound.seconds, place, index, bound))
    while opened:
        yield heappop(opened)[-1]


def reason_of(problem: str) -> str:
    """Return a message up to its colon without numbers, which many layouts have in common."""
    return problem.partition("=")[0] + ": " + problem.partition(": ")[2].partition(";")[0]


def layout_groups(
    problem: PlanningProblem, rejected: Counter[str], modes: Sequence[str] = tuple(MODES)
) -> Iterator[LayoutGroup]:
    """Yield all layouts of these modes but those that cannot run or fit, which `rejected` counts."""
    arch, node = problem.spec(problem.config).arch, problem.machine.network.cluster.levels[0].ranks
    for tensor in tensor_choices(problem.num_ranks, modes):
        for context in context_choices(problem.num_ranks // tensor.size, arch, tensor, node):
            yield from _groups_of(problem, tensor, context, rejected)


def _groups_of(
    problem: PlanningProblem, tensor: TensorChoice, context: ContextChoice, rejected: Counter[str]
) -> Iterator[LayoutGroup]:
    config = problem.config
    broken = check(
        LayoutChoice(tensor, micro_batch_size=64, context=context).apply_to(_with_batch(config, problem, tensor)),
        problem.num_ranks,
    )
    if broken:
        rejected[reason_of(broken[0])] += 1
        return
    spec = problem.spec(LayoutChoice(tensor, context=context).apply_to(config))
    for experts in expert_choices(spec.arch, tensor.size, problem.num_ranks):
        chosen = LayoutChoice(tensor, context=context, experts=experts)
        yield from _groups_with(problem, spec, chosen, rejected)


def _groups_with(
    problem: PlanningProblem, spec: RunSpec, chosen: LayoutChoice, rejected: Counter[str]
) -> Iterator[LayoutGroup]:
    """Yield the layouts with the tensor, context and expert ranks of one; `spec` has the first two."""
    tensor, context, experts = chosen.tensor, chosen.context, chosen.experts
    dispatcher = token_dispatcher(chosen.apply_to(problem.config))
    if (folded := fewest_ranks(replace(spec.mode, dispatcher=dispatcher), experts)) is None:
        return
    arch, (mode, mesh) = spec.arch, folded
    held = ParamCounts.of(arch, mode, mesh)
    weights = arch.num_layers * sum(held.layer.values())
    if experts == TOGETHER:
        along_data = DataAxisBound(problem.machine, arch.num_layers, held, mesh)
    else:
        plain_mesh = Mesh((("pipeline", 1), *stage_axes(spec.mode, 1)))
        reduced = ParamCounts.of(with_few_experts(arch), spec.mode, plain_mesh)
        along_data = DataAxisBound(problem.machine, arch.num_layers, reduced, plain_mesh)
    batch = problem.config.train.global_batch_size
    rest = problem.num_ranks // (tensor.size * context.size)
    chunk = spec.loss_chunk(problem.machine.on_gpu)
    shapes = list(pipelines(rest, arch.num_layers))
    data = mesh.size(("data",))
    by_ranks = {ranks: [shape for shape in shapes if shape[0] == ranks] for ranks, _, _ in shapes}
    by_ranks = {ranks: alike for ranks, alike in by_ranks.items() if rest // ranks % data == 0}
    for size in microbatch_sizes(batch):
        if size % mesh.size(mode.batch_axes):
            continue
        local = LocalSizes(arch, mode, mesh, size, problem.itemsize, kernels=KERNELS["gpu"])
        local = replace(local, expert_load=expected_load(local, problem.config.parallel.expert_load_imbalance))
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
                    others = zero, size, granularity, context, experts
                    allowed = [shape for shape in alike if problem.fixed.allow((tensor, *shape, *others))]
                    if len(allowed) < len(alike):
                        rejected["not as --fix says"] += len(alike) - len(allowed)
                    if not allowed:
                        continue
                    if cost.least_bytes(share) > problem.memory_bytes:
                        rejected["needs more memory than a rank has"] += len(allowed)
                        continue
                    waits_s = along_data.least_s(share)
                    seconds = (cost.least_s(share) + waits_s) * _ROUNDING
                    yield LayoutGroup(seconds, cost, share, waits_s, tensor, allowed, others)


def _with_batch(config: Config, problem: PlanningProblem, tensor: TensorChoice) -> Config:
    """Return the configuration with a batch that no batch rule refuses, to check the rules of shapes alone."""
    size = 64 * (problem.num_ranks // tensor.size)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
