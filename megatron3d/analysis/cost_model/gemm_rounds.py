"""Cost of running a collective in rounds with its GEMM (`parallel.tp_comm_overlap`), besides what remains exposed.

all-gather and GEMM         p GEMMs of 1/p of the rows, which fill the device less well than one
GEMM and reduce-scatter     p GEMMs of 1/p of the rows or columns, and one kernel that adds p terms
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron3d.analysis.cost_model.kernels import DeviceModel
from megatron3d.parallel.async_plan import async_plan
from megatron3d.parallel.matmul_plan import MatmulPlan, Move
from megatron3d.parallel.mesh import Mesh


class RoundsExcess(NamedTuple):
    """Seconds that rounds add to a linear: in forward, in a dgrad that gathers dY, and in one that scatters dX."""

    forward: float = 0.0
    gather_dy: float = 0.0
    reduce_dx: float = 0.0


def rounds_excess(plan: MatmulPlan, mesh: Mesh, m: float, n: float, k: float, device: DeviceModel) -> RoundsExcess:
    """Return what rounds add, for the sizes m, n and k that this rank multiplies."""
    rounds = async_plan(plan)
    forward, dgrad = {"M": m, "N": n, "K": k}, {"M": m, "K": k, "N": n}
    return RoundsExcess(
        _smaller_gemms(rounds.x or rounds.y, mesh, forward, device) + _sum_s(rounds.y, mesh, m * n, device),
        _smaller_gemms(rounds.dy, mesh, dgrad, device),
        _smaller_gemms(rounds.dx, mesh, dgrad, device) + _sum_s(rounds.dx, mesh, m * k, device),
    )


def _smaller_gemms(move: Move | None, mesh: Mesh, sizes: Mapping[str, float], device: DeviceModel) -> float:
    """Return the seconds by which as many GEMMs as ranks take longer than one."""
    if move is None:
        return 0.0
    ranks, dim = mesh.size(move.axes), str(move.dim)
    part = {**sizes, dim: sizes[dim] / ranks}
    return max(0.0, ranks * device.gemm_s(*part.values()) - device.gemm_s(*sizes.values()))


def _sum_s(move: Move | None, mesh: Mesh, num_elements: float, device: DeviceModel) -> float:
    """Return the seconds to read all terms of this rank's part and to write their sum."""
    if move is None:
        return 0.0
    return device.memory_bound_s(num_elements * (1 + 1 / mesh.size(move.axes)) * device.itemsize)
