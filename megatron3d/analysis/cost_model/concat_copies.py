"""Bytes that are copied to concatenate all-gathered shards, and to split a tensor for a reduce-scatter.

A collective delivers shards one after another.  Concatenation along the first dimension needs no copy; along the second
each element is read and written once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron3d.parallel.matmul_plan import MatmulPlan, Move, moves, whole_bytes
from megatron3d.parallel.mesh import Mesh


class ConcatCopies(NamedTuple):
    """Copied bytes by operand of Y[m, n] = X[m, k] W[n, k]^T and of its gradients; those of dW are W's."""

    x: float = 0
    w: float = 0
    y: float = 0
    dy: float = 0
    dx: float = 0

    @property
    def forward(self) -> float:
        """Bytes copied by the forward matmul."""
        return self.x + self.w + self.y


def concat_copies(plan: MatmulPlan, mesh: Mesh, m: int, n: int, k: int, itemsize: int) -> ConcatCopies:
    """Return the copies of one matmul with global sizes m, n, k."""
    plan = plan.on(mesh)
    x, w, y = whole_bytes(plan, mesh, m, n, k, itemsize)
    return ConcatCopies(
        _copied(moves(plan.x), "K", x, mesh),
        _copied(moves(plan.w), "K", w, mesh),
        _copied(moves(plan.y), "N", y, mesh),
        _copied(moves(plan.dy), "N", y, mesh),
        _copied(plan.dx_moves, "K", x, mesh),
    )


def _copied(steps: Iterable[Move], second: str, whole_bytes: float, mesh: Mesh) -> float:
    total = 0.0
    for axes, dim in steps:
        total += 2 * whole_bytes * (dim == second)
        whole_bytes /= mesh.size(axes) if dim else 1
    return total
