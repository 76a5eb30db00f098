"""Lower bound of the data axis: the slowdown of computation by its transfers, even if they are fully overlapped."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron3d.analysis.cost_model.data_axis import ParamCounts, collectives_per_step, data_axis_time
from megatron3d.analysis.cost_model.layer import Machine
from megatron3d.analysis.planner.options import ExpertChoice, PipelineShare
from megatron3d.model.architecture import Architecture
from megatron3d.parallel.expert_ranks import fold, stage_axes, with_experts
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.modes.mode import Mode


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
            mesh = Mesh((("pipeline", ranks), ("replica", 1), ("data", data), *self._mesh.axes[3:]))
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
    return folded, Mesh((("pipeline", 1), *axes), 0, folded.pieces)


def with_few_experts(arch: Architecture) -> Architecture:
    """Return a model with one narrow expert: the gradients of experts may be reduced over no data-parallel rank."""
    assert arch.experts is not None, "only experts are folded"
    return replace(arch, experts=replace(arch.experts, num_experts=1, ffn_hidden_size=1))
