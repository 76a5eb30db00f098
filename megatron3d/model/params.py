"""Parameters as tensors: views of the logical tensors in a fused one, and initial values by global index.

    local rows, parts q and k, two blocks:      q run 0 | k run 0 | q run 1 | k run 1

The box of a logical tensor (q, k, v; gate, up) consists of one run of rows per block.  Each run is a view, so writing
initial values or a checkpoint into the views writes the parameter.  Tensors have one or two dims.

Initial values are a function of (seed, name, global index), equal in every layout: each tile of a logical tensor has
its own generator, so that a rank draws only the tiles that overlap its box, and threads draw tiles in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import torch
from torch import Tensor

from megatron3d.ops.dropout import derive_seed
from megatron3d.parallel.layout import Box, ParamSpec, Part, box_shape
from megatron3d.parallel.mesh import Mesh


def part_views(spec: ParamSpec, local: Tensor, mesh: Mesh, start: int = 0) -> list[tuple[Part, Box, Tensor]]:
    """Return for every box that `local` holds: the part, the box in its logical tensor, a view without autograd.

    `local` is the local tensor, or a range of its elements that begins at `start` (a ZeRO shard); a partial row is a
    box of its own.  Boxes end at the logical shape: no view contains padding, and boxes of padding only are dropped.
    Together the views of all ranks that differ along the axes of the layout cover each logical tensor
    exactly once.
    """
    values, shape = local.detach().view(-1), spec.local_shape(mesh)
    boxes = spec.part_boxes(mesh)
    width = math.prod(shape[1:])
    assert start + len(values) <= shape[0] * width, f"{len(values)} elements from {start} on are not in {shape}"
    rows = [box_shape(part_box)[0] for part_box in boxes]
    assert all(n % spec.blocks == 0 for n in rows), f"{spec.blocks} blocks do not divide rows {rows} of {spec.parts}"
    views: list[tuple[Part, Box, Tensor]] = []
    row = 0
    for block in range(spec.blocks):
        for part, ((low, _), *others), n in zip(spec.held_parts(mesh), boxes, rows, strict=True):
            run = n // spec.blocks
            first, last = (max(row * width, start), min((row + run) * width, start + len(values)))
            for begin, end in _rectangles(first, last, width):
                view = values[begin - start : end - start]
                held = low + block * run + begin // width - row, others, begin % width
                views += _clipped(part, *held, view.view(-1, min(width, end - begin)))
            row += run
    return views


def _rectangles(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    """Split the elements [first, last) of rows of a width into the end of a row, whole rows, and the start of a row."""
    if first >= last:
        return
    cuts = sorted({first, min(-(-first // width) * width, last), max(last // width * width, first), last})
    yield from pairwise(cuts)


def _clipped(
    part: Part, row: int, others: Sequence[tuple[int, int]], column: int, view: Tensor
) -> Iterator[tuple[Part, Box, Tensor]]:
    """Yield the view [rows, columns] of a part at (row, column) without its padding; nothing if it is all padding."""
    held: Box = ((row, row + view.shape[0]),)
    if others:
        low = others[0][0] + column
        held = (*held, (low, low + view.shape[1]))
    clipped = tuple((low, max(low, min(high, size))) for (low, high), size in zip(held, part.shape, strict=True))
    if all(size > 0 for size in box_shape(clipped)):
        inside = tuple(slice(0, size) for size in box_shape(clipped))
        yield part, clipped, (view if others else view[:, 0])[inside]


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
