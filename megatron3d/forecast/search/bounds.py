"""Lower bounds of the step times of all layouts that the planner can choose, in their order.

A bubble takes a simulation.  Layouts that differ in their schedule alone are a group with a bound for any schedule, and
get bounds of their own when that of the group is the lowest left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from megatron3d.config.model_defaults import token_dispatcher
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.validate.rules import check
from megatron3d.experts.plan import fold, stage_axes, with_experts
from megatron3d.forecast.memory.activations import layer_activations, recomputed_activations, total_bytes
from megatron3d.forecast.search.options import (
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
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.time.data_axis import ParamCounts, collectives_per_step, data_axis_time
from megatron3d.forecast.time.layer import LayerTimes, Machine, layer_times, selective_recomputation
from megatron3d.forecast.time.step import ends_times
from megatron3d.model.expert_operations import expected_load
from megatron3d.model.local_sizes import KERNELS, LocalSizes
from megatron3d.model.spec import Recompute
from megatron3d.ops.plan import WHOLE_LOSS
from megatron3d.parallel.mesh import DATA, PIPELINE, Mesh
from megatron3d.parallel.modes import MODES
from megatron3d.parallel.modes.mode import Mode
from megatron3d.pipeline.actions import UNIT_COSTS
from megatron3d.pipeline.schedules import build_schedule
from megatron3d.pipeline.simulate import makespan


class DataAxisBound:
    """Lower bound of the data axis for layouts of one tensor mode: the slowdown of computation by its transfers."""

    def __init__(self, machine: Machine, num_layers: int, held: ParamCounts, mesh: Mesh) -> None:
        self._machine, self._num_layers = machine, num_layers
        self._held, self._mesh = held, mesh
        self._once: dict[tuple[int, bool], tuple[float, float]] = {}

    def least_s(self, share: PipelineShare) -> float:
        """Return the least seconds of a step, embedding and head left out."""
        ranks, data, num, zero = share
        if (key := (ranks, zero > 0)) not in self._once:
            mesh = Mesh(((PIPELINE, ranks), *zip(DATA, (1, data), strict=True), *self._mesh.axes[3:]))
            counts = {axes: count * self._num_layers // ranks for axes, count in self._held.layer.items()}
            found = data_axis_time(counts, mesh, self._machine, zero, (1, 1), math.inf)
            self._once[key] = found.sums.total, found.gathers.total
        sums_s, gathers_s = self._once[key]
        num_sums, num_gathers = collectives_per_step(zero, num)
        return self._machine.device.comm_tax * (num_sums * sums_s + num_gathers * gathers_s)


def fewest_ranks(mode: Mode, experts: ExpertChoice) -> tuple[Mode, Mesh] | None:
    """Return mode and mesh of the fewest data-parallel ranks that experts are distributed over; None if none have them.

    The ranks of an expert group are neighbours, so that its exchanges take as long with more data-parallel ranks.
    """
    inner = math.prod(size for _, size in mode.axes)
    axes = stage_axes(mode, math.lcm(inner, experts.size * experts.split) // inner)
    if fold(axes, experts.size, experts.split) is None:
        return None
    folded = with_experts(mode, experts.size, experts.split, axes)
    return folded, Mesh(((PIPELINE, 1), *axes), 0, folded.pieces)


class Bubbles:
    """Bubbles of schedules of equal stages, as parts of a microbatch's time on a rank."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, int, int], float] = {}

    def of(self, share: PipelineShare, schedule: str, virtual: int) -> float:
        """Return the bubble of a schedule, simulated with few microbatches."""
        ranks, few = share.pipeline, min(share.num_microbatches, 2 * share.pipeline)
        if (key := (ranks, schedule, virtual, few)) not in self._found:
            built = build_schedule(schedule, ranks, few, virtual)
            self._found[key] = makespan(built) / UNIT_COSTS.total - few if ranks > 1 else 0.0
        return self._found[key]


class PlainTimes(NamedTuple):
    """Seconds of a microbatch without recomputation: of the head, and of a layer of each kind with their number."""

    head_s: float
    layers: Sequence[tuple[LayerTimes, int]]

    @staticmethod
    def of(local: LocalSizes, machine: Machine) -> PlainTimes:
        """Return the times of a microbatch of these sizes."""
        kinds = local.by_kind(range(local.arch.num_layers))
        layers = [(layer_times(each, machine), count) for each, count in kinds]
        head = ends_times(local, machine)[1]
        return PlainTimes(head.forward.total + head.backward.total, layers)


class LayoutBound:
    """Lower bounds of time and memory for layouts with one tensor mode, microbatch size and recomputation."""

    def __init__(self, machine: Machine, plain: PlainTimes, local: LocalSizes, weights: int) -> None:
        self._work, self._weights, self._head_s = local, weights, plain.head_s
        kinds, is_full = local.by_kind(range(local.arch.num_layers)), local.recompute.granularity == "full"
        seconds = []
        for (times, count), (each, _) in zip(plain.layers, kinds, strict=True):
            again_s = selective_recomputation(each, machine).total + is_full * times.forward.total
            seconds.append((times.forward.total + times.backward.total + again_s, count))
        self._layers_s = sum(each_s * count for each_s, count in seconds)
        self._least_layer_s = min(each_s for each_s, _ in seconds)
        self._busiest: dict[int, float] = {}
        least = min(total_bytes(layer_activations(each)) for each, _ in kinds)
        self._activations = local.residual if is_full else least
        self._again = recomputed_activations(local) if is_full else 0

    def least_s(self, share: PipelineShare, bubble: float = 0.0) -> float:
        """Return the seconds of a step with free communication over data and pipeline.

        It is at least that of equal stages without a head, and the work of the busiest rank for all microbatches.

        Args:
            bubble: that of the schedule; 0 for a bound of any schedule.
        """
        ranks, num = share.pipeline, share.num_microbatches
        return max((num + bubble) * self._layers_s / ranks, num * self._busiest_s(ranks))

    def _busiest_s(self, ranks: int) -> float:
        """Return the least seconds of a microbatch on the busiest rank, where each rank holds whole layers."""
        if ranks not in self._busiest:
            num_layers, layer_s = self._work.arch.num_layers, self._least_layer_s
            least_s = math.inf
            for mine in range(num_layers + 1) if ranks > 1 else (num_layers,):
                # A number of layers with the head, which grows, and the largest part of the others, which falls.
                with_head_s = mine * layer_s + self._head_s
                others_s = math.ceil((num_layers - mine) / max(ranks - 1, 1)) * layer_s
                least_s = min(least_s, max(with_head_s, others_s))
                if with_head_s >= others_s:
                    break
            self._busiest[ranks] = least_s
        return self._busiest[ranks]

    def least_bytes(self, share: PipelineShare) -> float:
        """Return the bytes of weights, gradients, optimizer, and the activations of 1F1B's first rank."""
        size, wide = self._work.itemsize, self._work.wide
        main = 0 if size == wide else wide
        ranks = share.data * self._work.mesh.size(self._work.mode.context)
        parts = [1 / ranks if share.zero_stage >= stage else 1 for stage in (1, 2, 3)]
        each = size * (parts[2] if main else 1) + (main + 2 * wide) * parts[0] + wide * parts[1]
        held = self._activations * self._work.arch.num_layers * min(1, share.num_microbatches / share.pipeline)
        return each * self._weights / share.pipeline + held + self._again


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
    # A batch that no batch rule refuses, to check the rules of shapes alone.
    train = config.train.model_copy(update={"global_batch_size": 64 * (problem.num_ranks // tensor.size)})
    layout = LayoutChoice(tensor, micro_batch_size=64, context=context)
    if broken := check(layout.apply_to(config.model_copy(update={"train": train})), problem.num_ranks):
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
        plain_mesh = Mesh(((PIPELINE, 1), *stage_axes(spec.mode, 1)))
        assert arch.experts is not None, "only experts are folded"
        # One narrow expert: the gradients of experts may be reduced over no data-parallel rank.
        few = replace(arch, experts=replace(arch.experts, num_experts=1, ffn_hidden_size=1))
        reduced = ParamCounts.of(few, spec.mode, plain_mesh)
        along_data = DataAxisBound(problem.machine, arch.num_layers, reduced, plain_mesh)
    batch = problem.config.train.global_batch_size
    rest = problem.num_ranks // (tensor.size * context.size)
    chunk = spec.loss_chunk(problem.machine.on_gpu) if problem.profile.logit_bytes is None else WHOLE_LOSS
    shapes = list(pipelines(rest, arch.num_layers))
    data = mesh.size(DATA[1:])
    by_ranks = {ranks: [shape for shape in shapes if shape[0] == ranks] for ranks, _, _ in shapes}
    by_ranks = {ranks: alike for ranks, alike in by_ranks.items() if rest // ranks % data == 0}
    for size in microbatch_sizes(batch):
        if size % mesh.size(mode.batch_axes):
            continue
        local = LocalSizes(arch, mode, mesh, size, problem.itemsize, kernels=KERNELS["gpu"], loss_chunk=chunk)
        local = replace(local, expert_load=expected_load(local, problem.config.parallel.expert_load_imbalance))
        plain = PlainTimes.of(local, problem.machine)
        for granularity in RECOMPUTATIONS:
            here = local.recomputing(Recompute(granularity or "none"))
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
