"""Initial values as a function of (seed, name, global index), equal in every layout.

Each tile of a logical tensor has its own generator, seeded by (seed, name, tile), so that a rank draws only the tiles
that overlap its box, and threads draw tiles in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
            view.copy_(normal_box(seed, part.name, part.shape, held).mul_(spec.init))


def normal_box(seed: int, name: str, shape: tuple[int, ...], held: Box) -> Tensor:
    """Return the box `held` of a tensor of standard normal values, fp32 on the CPU; as many threads as torch uses."""
    out = torch.empty(box_shape(held))
    sides = _TILE[-len(shape) :]
    bounds = zip(held, sides, strict=True)
    tiles = list(product(*(range(low // side, -(-high // side)) for (low, high), side in bounds)))

    def draw(tile: tuple[int, ...]) -> None:
        size = tuple(min(side, whole - t * side) for t, side, whole in zip(tile, sides, shape, strict=True))
        generator = torch.Generator().manual_seed(derive_seed(seed, name, tile))
        values = torch.empty(size).normal_(generator=generator)
        cuts = list(_overlap(tile, sides, size, held))
        out[tuple(to for to, _ in cuts)] = values[tuple(of for _, of in cuts)]

    num_threads = min(torch.get_num_threads(), len(tiles))
    if num_threads <= 1:
        for tile in tiles:
            draw(tile)
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(draw, tiles))
    return out


def _overlap(
    tile: tuple[int, ...], sides: tuple[int, ...], size: tuple[int, ...], held: Box
) -> Iterator[tuple[slice, slice]]:
    """Yield the overlap of tile and box in each dimension, in the box's and in the tile's coordinates."""
    for t, side, n, (low, high) in zip(tile, sides, size, held, strict=True):
        first, last = max(low, t * side), min(high, t * side + n)
        yield slice(first - low, last - low), slice(first - t * side, last - t * side)
