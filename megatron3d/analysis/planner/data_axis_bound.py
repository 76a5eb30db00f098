"""Lower bound of the data axis: the slowdown of computation by its transfers, even if they are fully overlapped."""

from __future__ import annotations

import math

from megatron3d.analysis.cost_model.data_axis import ParamCounts, collectives_per_step, data_axis_time
from megatron3d.analysis.cost_model.layer import Machine
from megatron3d.analysis.planner.options import PipelineShare
from megatron3d.parallel.mesh import Mesh


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
