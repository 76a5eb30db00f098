"""Lower bounds of the step times of all layouts that the planner can choose, in their order.

A bound is a sum over the same operations as a prediction, with a pipeline and a data axis that overlap with all of
them.  A bubble takes a simulation.  Layouts that differ in their schedule alone are a group with a bound for any
schedule, and get bounds of their own when that of the group is the lowest left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from megatron3d.config.model_defaults import token_dispatcher
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import OptimizerConfig
from megatron3d.config.validate.rules import check
from megatron3d.experts.plan import fold, stage_axes, with_experts
from megatron3d.forecast.memory.activations import layer_activations, recomputed_activations, total_bytes
from megatron3d.forecast.memory.step_spec import local_sizes
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
from megatron3d.forecast.time.layer import LayerTimes, Machine, layer_times, recomputation_time, times_of
from megatron3d.forecast.time.step import with_chunks
from megatron3d.model.expert_operations import expected_load
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.operations import head_operations
from megatron3d.model.spec import Architecture, Recompute
from megatron3d.optim.rule_spec import rule_of
from megatron3d.parallel.mesh import DATA, PIPELINE, Mesh
from megatron3d.parallel.modes import MODES
from megatron3d.parallel.modes.mode import Mode
from megatron3d.pipeline.actions import UNIT_COSTS
from megatron3d.pipeline.schedules import build_schedule
from megatron3d.pipeline.simulate import makespan


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


class DataAxisBound:
    """Least seconds of the data axis of steps, embedding and head left out: gradient reductions and all-gathers.

    Attributes:
        tax: slowdown of computation by each second of them.
    """

    def __init__(
        self,
        machine: Machine,
        arch: Architecture,
        mode: Mode,
        experts: ExpertChoice,
        weights: int,
        *,
        stores_weights: bool,
    ) -> None:
        """Count the parameters of ranks.

        Args:
            arch: model with one narrow expert, unless each rank has all of them.
            weights: parameters of a layer on a rank, experts included.
            stores_weights: they are all-gathered in fp8, all of them by this bound.
        """
        self._stores_weights = stores_weights
        self._plain = Mesh(((PIPELINE, 1), *stage_axes(mode, 2)))  # of which gradients are reduced over data
        self._machine, self._num_layers, self._context = machine, arch.num_layers, self._plain.size(mode.context)
        self._held = ParamCounts.of(arch, mode, self._plain).layer
        self._ranks, self._experts = experts.size * experts.split, max(weights - sum(self._held.values()), 0)
        self._once = cache(self._of_one)
        self.tax = machine.device.comm_tax

    def _of_one(self, ranks: int, data: int, is_sharded: bool) -> tuple[float, float]:
        """Return the seconds of one reduction, and of one all-gather."""
        axes, part = self._plain.axes[3:], self._num_layers // ranks
        counts = {axes: count * self._num_layers // ranks for axes, count in self._held.items()}
        meshes = [(Mesh(((PIPELINE, ranks), *zip(DATA, (1, data), strict=True), *axes)), counts)]
        if self._ranks > 1:
            # Ranks of an expert group are neighbours; of those with the same experts, some may be of one data rank.
            ring, inner = data * self._context, math.prod(size for _, size in axes) // self._context
            copies = max(inner // self._ranks, 1)
            sizes = (DATA[1], ring * inner // (self._ranks * copies)), ("copies", copies), ("inside", self._ranks)
            meshes.append((Mesh(((PIPELINE, ranks), *sizes)), {(DATA[1], "copies"): self._experts * part}))
        found = [
            data_axis_time(held, mesh, self._machine, is_sharded, (1, 1), math.inf, stored=stored)
            for mesh, held, stored in ((*each, each[1] if self._stores_weights else {}) for each in meshes)
        ]
        return sum(each.sums.total for each in found), sum(each.gathers.total for each in found)

    def seconds(self, share: PipelineShare) -> tuple[float, float]:
        """Return the least seconds of all collectives of a step, and of those of one kind."""
        times = collectives_per_step(share.zero_stage, share.num_microbatches)
        each = self._once(share.pipeline, share.data, share.zero_stage > 0)
        both = [num * each_s for num, each_s in zip(times, each, strict=True)]
        return sum(both), max(both)


def with_data_axis(compute_s: float, waits_s: tuple[float, float], share: PipelineShare, tax: float) -> float:
    """Return the least seconds of a step with `compute_s` of computation and `waits_s` of the data axis.

    Collectives slow computation down while it hides them, and no step is shorter than those of one kind, but for the
    last microbatches of the stages of a rank, which may all be behind the first of its reductions.
    """
    total_s, longest_s = waits_s
    last = (1 - tax) * share.pipeline / share.num_microbatches
    return max(compute_s, (1 - tax) * longest_s / (1 + last)) + tax * total_s


@cache
def bubble_of(ranks: int, num_microbatches: int, schedule: str, virtual: int) -> float:
    """Return the bubble of a schedule of equal stages, as a part of a microbatch's time on a rank."""
    if ranks == 1:
        return 0.0
    return makespan(build_schedule(schedule, ranks, num_microbatches, virtual)) / UNIT_COSTS.total - num_microbatches


@dataclass(frozen=True)
class PlainSeconds:
    """Seconds of a microbatch without recomputation, found where they are asked for: many layouts do not fit."""

    local: LocalSizes
    machine: Machine

    @cached_property
    def head_s(self) -> float:
        """Seconds of the head."""
        (head_s,) = self._both([times_of(head_operations(self.local), self.local, self.machine)])
        return head_s

    @cached_property
    def layers_s(self) -> Sequence[float]:
        """Seconds of a layer of each kind."""
        kinds = self.local.by_kind(range(self.local.arch.num_layers))
        return self._both(layer_times(each, self.machine) for each, _ in kinds)

    def _both(self, times: Iterable[LayerTimes]) -> list[float]:
        return [*(each.forward.total + each.backward.total for each in times)]


class LayoutBound:
    """Lower bounds of time and memory for layouts with one tensor mode, microbatch size and recomputation.

    Both are sums over the operations of layers and head, of which the first pipeline rank has its part.
    """

    def __init__(self, local: LocalSizes, plain: PlainSeconds, weights: int, optimizer: OptimizerConfig) -> None:
        self._local, self._weights, self._plain = local, weights, plain
        rules = rule_of(optimizer).all
        self._state_bytes = min(sum(rule.state_itemsizes(optimizer, local.wide)) for rule in rules)
        self._kinds = local.by_kind(range(local.arch.num_layers))
        self._busiest: dict[int, float] = {}

    @cached_property
    def _activations(self) -> tuple[int, int]:
        """Bytes of a microbatch in all layers, and of what is recomputed."""
        if self._local.recompute.granularity == "full":
            return self._local.residual * self._local.arch.num_layers, recomputed_activations(self._local)
        return min(total_bytes(layer_activations(each)) for each, _ in self._kinds) * self._local.arch.num_layers, 0

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        """Seconds of all layers, and of the fastest one, recomputation included."""
        again_s = (recomputation_time(each, self._plain.machine).total for each, _ in self._kinds)
        each_s = [kept_s + more_s for kept_s, more_s in zip(self._plain.layers_s, again_s, strict=True)]
        return sum(one_s * count for one_s, (_, count) in zip(each_s, self._kinds, strict=True)), min(each_s)

    def least_s(self, share: PipelineShare, schedule: tuple[str, int] | None = None) -> float:
        """Return the seconds of a step with free communication over data and pipeline.

        It is at least that of equal stages without a head, and the work of the busiest rank for all microbatches.

        Args:
            schedule: name and stages per rank, whose bubble counts; None: a bound of any schedule.
        """
        ranks, num = share.pipeline, share.num_microbatches
        bubble = bubble_of(ranks, min(num, 2 * ranks), *schedule) if schedule else 0.0  # few microbatches tell it
        return max((num + bubble) * self._seconds[0] / ranks, num * self._busiest_s(ranks))

    def _busiest_s(self, ranks: int) -> float:
        """Return the least seconds of a microbatch on the busiest rank, where each rank holds whole layers."""
        if ranks not in self._busiest:
            num_layers, layer_s = self._local.arch.num_layers, self._seconds[1]
            least_s = math.inf
            for mine in range(num_layers + 1) if ranks > 1 else (num_layers,):
                # A number of layers with the head, which grows, and the largest part of the others, which falls.
                with_head_s = mine * layer_s + self._plain.head_s
                others_s = math.ceil((num_layers - mine) / max(ranks - 1, 1)) * layer_s
                least_s = min(least_s, max(with_head_s, others_s))
                if with_head_s >= others_s:
                    break
            self._busiest[ranks] = least_s
        return self._busiest[ranks]

    def least_bytes(self, share: PipelineShare, most: float = math.inf) -> float:
        """Return the bytes of weights, gradients, optimizer, and the activations of 1F1B's first rank; without these
        where the others are more than `most`."""
        wide, size = self._local.wide, self._local.itemsize
        ranks = share.data * self._local.mesh.size(self._local.mode.context)
        parts = [1 / ranks if share.zero_stage >= stage else 1 for stage in (1, 2, 3)]
        # Sharded weights are master weights alone; weights in fp8 have master weights in every precision.
        held = wide * parts[0] if parts[2] < 1 else size + wide * parts[0] * (size < wide)
        if self._local.stores_weights and parts[2] == 1:
            held = min(held, 1 + wide * parts[0])
        each = held + self._state_bytes * parts[0] + wide * parts[1]
        state = each * self._weights / share.pipeline
        if state > most:
            return state
        kept, again = self._activations
        return state + kept * min(1, share.num_microbatches / share.pipeline) + again


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
    along_data: DataAxisBound
    tensor: TensorChoice
    shapes: Sequence[PipelineShape]
    others: tuple[int, int, str | None, ContextChoice, ExpertChoice]

    def least_s(self, schedule: tuple[str, int] | None = None) -> float:
        """Return the bound with a schedule and stages per rank, or with any."""
        compute_s = self.cost.least_s(self.share, schedule)
        return with_data_axis(compute_s, self.along_data.seconds(self.share), self.share, self.along_data.tax)

    def bounds(self) -> Iterator[LowerBound]:
        """Yield the bound of each layout."""
        for shape in self.shapes:
            yield LowerBound(self.least_s(shape[1:]), (self.tensor, *shape, *self.others))


# Of the bound of a group: bubbles of 0 may be less than that by rounding.
_ROUNDING = 1 - 1e-9


def in_order(groups: Sequence[LayoutGroup]) -> Iterator[LowerBound]:
    """Yield the bounds of all layouts from the lowest; those of equal bounds in the order of their groups."""
    opened: list[tuple[float, int, int, LowerBound]] = []
    for place in sorted(range(len(groups)), key=lambda place: groups[place].seconds):
        while opened and opened[0][0] < groups[place].seconds:
            yield heappop(opened)[-1]
        for index, bound in enumerate(groups[place].bounds()):
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
    size, samples = 64 * (problem.num_ranks // tensor.size), config.train.train_samples
    batch = {"global_batch_size": size, "train_samples": samples and max(samples, size)}
    train = config.train.model_copy(update=batch)
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
    arch, reduced, (mode, mesh) = spec.arch, spec.arch, folded
    if experts != TOGETHER:
        assert arch.experts is not None, "only experts are folded"
        reduced = replace(arch, experts=replace(arch.experts, num_experts=1, ffn_hidden_size=1))
    held = sum(ParamCounts.of(arch, mode, mesh).layer.values())
    stores_weights = spec.fp8 is not None and spec.fp8.stores_weights
    along_data = DataAxisBound(problem.machine, reduced, spec.mode, experts, held, stores_weights=stores_weights)
    weights = arch.num_layers * held
    batch, load = problem.config.train.global_batch_size, problem.config.parallel.expert_load_imbalance
    rest, data = problem.num_ranks // (tensor.size * context.size), mesh.size(DATA[1:])
    shapes = groupby(pipelines(rest, arch.num_layers), key=itemgetter(0))
    by_ranks = {ranks: list(alike) for ranks, alike in shapes if rest // ranks % data == 0}
    whole = with_chunks(local_sizes(spec, problem.machine.kernels_of(spec)), problem.machine)
    # Of all schedules the bound is that of the faster quantization: of blocks the kernel's, else the compiled graph's.
    whole = replace(whole, defers_wgrads=spec.fp8 is not None and spec.fp8.recipe.block is not None)
    for size in microbatch_sizes(batch):
        if size % mesh.size(mode.batch_axes):
            continue
        local = replace(whole, mode=mode, mesh=mesh, micro_batch_size=size)
        local = replace(local, expert_load=expected_load(local, load))
        plain = PlainSeconds(local, problem.machine)
        for granularity in RECOMPUTATIONS:
            here = local.recomputing(Recompute(granularity or "none"))
            cost = LayoutBound(here, plain, weights, problem.config.optimizer)
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
                    if cost.least_bytes(share, problem.memory_bytes) > problem.memory_bytes:
                        rejected["needs more memory than a rank has"] += len(allowed)
                        continue
                    group = LayoutGroup(0.0, cost, share, along_data, tensor, allowed, others)
                    yield group._replace(seconds=group.least_s() * _ROUNDING)
