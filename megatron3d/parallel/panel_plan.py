"""In which pieces one planned matmul is moved and multiplied: whole, or panel by panel along one of M, N and K.

    Y[M, N] = X[M, K] W[K, N]         panels along M: of X and Y    along N: of W and Y    along K: of X and W

A panel of a gathered operand arrives under the product of the panel before it, and a panel of partial sums leaves under
that of the next.  Along K this is SUMMA (van de Geijn and Watts 1997), its broadcasts being all-gathers of slices;
along M or N it is what Wang et al. do (ASPLOS 2023, "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models").

Every rank brings a slice of its shard into each panel, so that a panel along K is, with 2 ranks and 3 panels,

    K  | 0 1 2 | 0 1 2 |        the numbers being panels, the bars the ends of shards: two cells of three slices

and the operand that has the same dimension and is stored in another way takes the same numbers from the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves, reductions
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.tp_overlap import Direction, TPOverlap

Table = Mapping[str, str]
# The dimensions of X, W and Y.
TENSORS: Mapping[str, str] = {"x": "MK", "w": "NK", "y": "MN"}


@dataclass(frozen=True)
class Sweep:
    """Panels along a dimension: of each of `cells` equal parts of it the same slice, (start, length)."""

    dim: str
    cells: int
    slices: tuple[tuple[int, int], ...]

    @property
    def num_panels(self) -> int:
        """How many there are."""
        return len(self.slices)


# One panel, of which every tensor is a part as a whole.
WHOLE = Sweep("", 1, ((0, 0),))


def stored_over(table: Table, dim: str) -> Axes:
    """Axes over which a dimension is gathered."""
    return tuple(axis for axis, moved in table.items() if moved == dim)


def sent(plan: MatmulPlan, at: Direction, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, float]:
    """Elements that each rank sends of X, W and Y and their gradients; `sizes` are those that it multiplies itself."""
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


def choose(plan: MatmulPlan, at: Direction, sizes: Mapping[str, int], overlap: TPOverlap, mesh: Mesh) -> Sweep:
    """The sweep along the dimension in whose panels most elements move; whole where nothing does."""
    if overlap.num_panels == 1:
        return WHOLE
    elements = sent(plan, at, sizes, mesh)
    if overlap.keep_gathered_weights:
        elements["w"] = 0.0
    hidden = {dim: sum(elements[name] for name, dims in TENSORS.items() if dim in dims) for dim in "MNK"}
    dim = max(hidden, key=lambda dim: hidden[dim])
    return panels(plan, dim, sizes[dim], overlap.num_panels, mesh) if hidden[dim] else WHOLE


def panels(plan: MatmulPlan, dim: str, size: int, num_panels: int, mesh: Mesh) -> Sweep:
    """At most so many panels of a dimension that I multiply `size` of, as equal as they can be."""
    tables: Mapping[str, Table] = {"x": plan.x, "w": plan.w, "y": plan.dy}
    cells = math.lcm(*(mesh.size(stored_over(tables[name], dim)) for name, dims in TENSORS.items() if dim in dims))
    width, rest = divmod(size, cells)
    assert rest == 0, f"{dim}={size} does not divide by {cells}"
    length = -(-width // num_panels)
    return Sweep(dim, cells, tuple((start, min(length, width - start)) for start in range(0, width, length)))
