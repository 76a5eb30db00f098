"""Lower bounds of a layout's step time and memory, from one layer's times and activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron3d.analysis.cost_model.breakdown import combine
from megatron3d.analysis.cost_model.embedding_head import head_times
from megatron3d.analysis.cost_model.expert_layer import times_of_layer
from megatron3d.analysis.cost_model.layer import LayerTimes, Machine, selective_recomputation
from megatron3d.analysis.memory_model.activations import layer_activations, recomputed_activations, total_bytes
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.planner.options import PipelineShare
from megatron3d.parallel.loss_chunks import LossChunk
from megatron3d.pipeline.action_costs import UNIT_COSTS
from megatron3d.pipeline.schedules import build_schedule
from megatron3d.pipeline.simulate import makespan


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
    def of(local: LocalSizes, machine: Machine, loss_chunk: LossChunk) -> PlainTimes:
        """Return the times of a microbatch of these sizes."""
        kinds = local.by_kind(range(local.arch.num_layers))
        layers = [(times_of_layer(each, machine), count) for each, count in kinds]
        return PlainTimes(head_times(local, machine, loss_chunk).total, layers)


class LayoutBound:
    """Lower bounds of time and memory for layouts with one tensor mode, microbatch size and recomputation."""

    def __init__(self, machine: Machine, plain: PlainTimes, local: LocalSizes, weights: int) -> None:
        self._work, self._weights, self._head_s = local, weights, plain.head_s
        kinds, is_full = local.by_kind(range(local.arch.num_layers)), local.recompute.granularity == "full"
        seconds = []
        for (times, count), (each, _) in zip(plain.layers, kinds, strict=True):
            again_s = combine(selective_recomputation(each, machine)).total + is_full * times.forward.total
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
