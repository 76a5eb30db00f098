"""Initial values as a function of (seed, name, global index), equal in every layout.

Each tile of a logical tensor has its own generator, seeded by (seed, name, tile), so that a rank draws only the tiles
that overlap its box.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from megatron3d.ops.seeds import derive_seed
from megatron3d.parallel.layout import Box, ParamSpec, box_shape
from megatron3d.parallel.logical_views import part_views
from megatron3d.parallel.mesh import Mesh

_TILE = (64, 1024)


def initialize(spec: ParamSpec, local: Tensor, mesh: Mesh, seed: int, start: int = 0) -> None:
    """Fill a rank's local tensor, or its elements from `start` on; padding becomes 0."""
    local.detach().fill_(0.0)
    for part, held, view in part_views(spec, local, mesh, start):
        if spec.init == 0:
            view.fill_(spec.fill)
        else:
            view.copy_(normal_box(seed, part.name, part.shape, held) * spec.init)


def normal_box(seed: int, name: str, shape: tuple[int, ...], held: Box) -> Tensor:
    """Return the box `held` of a tensor of standard normal values, fp32 on the CPU."""
    out = torch.empty(box_shape(held))
    sides = _TILE[-len(shape) :]
    for tile in product(*(range(low // side, -(-high // side)) for (low, high), side in zip(held, sides, strict=True))):
        size = tuple(min(side, whole - t * side) for t, side, whole in zip(tile, sides, shape, strict=True))
        generator = torch.Generator().manual_seed(derive_seed(seed, name, tile))
        values = torch.empty(size).normal_(generator=generator)
        cuts = list(_overlap(tile, sides, size, held))
        out[tuple(to for to, _ in cuts)] = values[tuple(of for _, of in cuts)]
    return out


def _overlap(
    tile: tuple[int, ...], sides: tuple[int, ...], size: tuple[int, ...], held: Box
) -> Iterator[tuple[slice, slice]]:
    """Yield the overlap of tile and box in each dimension, in the box's and in the tile's coordinates."""
    for t, side, n, (low, high) in zip(tile, sides, size, held, strict=True):
        first, last = max(low, t * side), min(high, t * side + n)
        yield slice(first - low, last - low), slice(first - t * side, last - t * side)
