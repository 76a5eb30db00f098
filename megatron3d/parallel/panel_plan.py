"""The panels of a panelled matmul (`parallel.tp_num_panels`): equal slices along one of M, N and K.

    Y[M, N] = X[M, K] W[K, N]         panels along M: of X and Y    along N: of W and Y    along K: of X and W

A panel of a gathered operand arrives during the GEMM of the panel before it, and a panel of partial sums is reduced
during that of the next.  Along K this is SUMMA (van de Geijn and Watts 1997), with all-gathers of slices for its
broadcasts; along M or N it is the decomposition of Wang et al. (ASPLOS 2023, "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models").

Every rank contributes a slice of its shard to each panel.  With 2 ranks and 3 panels along K

    K  | 0 1 2 | 0 1 2 |        numbers are panels, bars the ends of shards: two cells of three slices

and the other operand with this dimension, which may be stored differently, is sliced along the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.linear.overlap_plan import Direction, TPOverlap
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves, reductions
from megatron3d.parallel.mesh import Axes, Mesh

Table = Mapping[str, str]
# The dimensions of X, W and Y.
TENSORS: Mapping[str, str] = {"x": "MK", "w": "NK", "y": "MN"}


@dataclass(frozen=True)
class PanelPlan:
    """Panels along `dim`: panel j is slice j, (start, length), of each of `cells` equal parts of the dimension."""

    dim: str
    cells: int
    slices: tuple[tuple[int, int], ...]

    @property
    def num_panels(self) -> int:
        """Number of panels."""
        return len(self.slices)


# One panel that holds every tensor whole.
WHOLE = PanelPlan("", 1, ((0, 0),))


def stored_over(table: Table, dim: str) -> Axes:
    """Return the axes over which a dimension is gathered."""
    return tuple(axis for axis, moved in table.items() if moved == dim)


def sent_elements(plan: MatmulPlan, at: Direction, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, float]:
    """Return the elements that each rank sends of X, W, Y and their gradients; `sizes` are those of its own GEMM."""
    forward = {"x": [moves(plan.x)], "w": [moves(plan.w)], "y": [moves(plan.y)]}
    backward = {"x": [moves(plan.x), plan.dx_moves], "w": 2 * [moves(plan.w)], "y": [moves(plan.dy)]}
    steps: Mapping[str, list[tuple[Move, ...]]] = forward if at is Direction.FORWARD else backward
    return {
        name: sum(
            call.wire_bytes
            for chain in chains
            for call in reductions(chain, math.prod(sizes[dim] for dim in TENSORS[name]), mesh)
        )
        for name, chains in steps.items()
    }


def plan_panels(plan: MatmulPlan, at: Direction, sizes: Mapping[str, int], overlap: TPOverlap, mesh: Mesh) -> PanelPlan:
    """Return panels along the dimension in which most elements move; one panel where none do."""
    if overlap.num_panels == 1:
        return WHOLE
    elements = sent_elements(plan, at, sizes, mesh)
    if overlap.keep_gathered_weights:
        elements["w"] = 0.0
    hidden = {dim: sum(elements[name] for name, dims in TENSORS.items() if dim in dims) for dim in "MNK"}
    dim = max(hidden, key=lambda dim: hidden[dim])
    return split_into_panels(plan, dim, sizes[dim], overlap.num_panels, mesh) if hidden[dim] else WHOLE


def split_into_panels(plan: MatmulPlan, dim: str, size: int, num_panels: int, mesh: Mesh) -> PanelPlan:
    """Return at most `num_panels` panels, as equal as possible, of a dimension of `size` in this rank's GEMM."""
    tables: Mapping[str, Table] = {"x": plan.x, "w": plan.w, "y": plan.dy}
    cells = math.lcm(*(mesh.size(stored_over(tables[name], dim)) for name, dims in TENSORS.items() if dim in dims))
    width, rest = divmod(size, cells)
    assert rest == 0, f"{dim}={size} does not divide by {cells}"
    length = -(-width // num_panels)
    return PanelPlan(dim, cells, tuple((start, min(length, width - start)) for start in range(0, width, length)))
