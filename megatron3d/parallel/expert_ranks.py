"""Expert parallelism: ranks of a stage among which the experts of a layer are distributed, whole ones to each.

    dense     pipeline | replica . data . context . tensor axes         split tokens and matrices
    experts   pipeline | the other axes (edata) . expert axes           the last axes of the same mesh

The expert axes are the last axes of the mesh whose product is the expert-parallel size, so that their ranks are
neighbours: tensor axes first, then context, then all data-parallel ranks of a replica.  (Parallel folding, Liu et al.
2025, arXiv:2504.14960.)
"""

from __future__ import annotations

from dataclasses import replace

from megatron3d.parallel.mesh import DATA, Axes
from megatron3d.parallel.modes.mode import Mode


def expert_sizes(mode: Mode, num_shards: int) -> dict[int, Axes]:
    """Return the possible expert-parallel sizes, each with its axes in mesh order.

    Args:
        num_shards: data-parallel ranks of one replica.
    """
    found: dict[int, Axes] = {1: ()}
    size, axes = 1, Axes()
    for name, ranks in reversed(((DATA[1], num_shards), *mode.axes)):
        if ranks > 1:
            size, axes = size * ranks, (name, *axes)
            found[size] = axes
    return found


def with_experts(mode: Mode, size: int, num_shards: int) -> Mode:
    """Return a mode whose experts are distributed over `size` ranks; unchanged where no axes have that product."""
    return replace(mode, experts=expert_sizes(mode, num_shards).get(size, ()))
