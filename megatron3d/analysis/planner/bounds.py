"""Lower bounds of the step times of all layouts that the planner can choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    LayoutChoice,
    LayoutFields,
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


def reason_of(problem: str) -> str:
    """Return a message up to its colon without numbers, which many layouts have in common."""
    return problem.partition("=")[0] + ": " + problem.partition(": ")[2].partition(";")[0]


def layout_bounds(
    problem: PlanningProblem, rejected: Counter[str], modes: Sequence[str] = tuple(MODES)
) -> Iterator[LowerBound]:
    """Yield the bounds of all layouts of these modes but those that cannot run or fit, which `rejected` counts."""
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
        rejected[reason_of(broken[0])] += 1
        return
    spec = problem.spec(LayoutChoice(tensor, context=context).apply_to(config))
    for experts in expert_choices(spec.arch, tensor.size, problem.num_ranks):
        chosen = LayoutChoice(tensor, context=context, experts=experts)
        yield from _bounds_with(problem, spec, chosen, bubbles, rejected)


def _bounds_with(
    problem: PlanningProblem, spec: RunSpec, chosen: LayoutChoice, bubbles: Bubbles, rejected: Counter[str]
) -> Iterator[LowerBound]:
    """Yield the bounds of layouts with the tensor, context and expert ranks of one; `spec` has the first two."""
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
                    given = ((tensor, *shape, zero, size, granularity, context, experts) for shape in alike)
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
