"""Weights of a flat buffer that are stored and all-gathered in fp8 (`train.fp8_param_gather`).

    master weights      this rank's shard, rounded to the network's dtype
    largest values      of the blocks that the shard touches;  all-reduced over ZeRO's ranks, and where a block is the
                        whole tensor over the axes that split it
    fp8                 this rank's elements, once per step;  all-gathered as bytes

A flat shard cuts blocks anywhere: largest values are exchanged, one for 16,384 elements with blocks of 128 x 128, and
each rank rounds its own elements with the scales of whole blocks.  So bits are those of weights that are quantized
where they are multiplied.  Backward multiplies W^T, whose blocks must therefore be those of W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.linear.fp8 import Fp8Gemm, largest_of_blocks, round_to_fp8, scales_of
from megatron3d.linear.fp8_plan import Blocks
from megatron3d.linear.gemm import Operand


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored in fp8.

    Attributes:
        gemm: recipe that multiplies it.
        num_matrices: matrices of equal size that it has one below the other, each with its own blocks: of experts.
    """

    gemm: Fp8Gemm
    num_matrices: int = 1


class Held(NamedTuple):
    """A weight in a flat buffer.

    Attributes:
        shape: its local shape.
        start: first of its elements that this rank updates; where: these elements in the rank's shard.
    """

    stored: StoredWeight
    shape: tuple[int, int]
    start: int
    where: slice


class _Piece(NamedTuple):
    """Whole rows of a weight that this rank has elements of.

    Attributes:
        rows: the rows; blocks: the blocks that they consist of; at: those of the weight's blocks that these are.
        inside: this rank's elements among theirs; where: in the rank's shard.
    """

    rows: int
    blocks: Blocks
    at: slice
    inside: slice
    where: slice


class Fp8Shard:
    """Scales of all weights of a flat buffer, and the quantization of this rank's shard.

    Attributes:
        largest: largest value of each block, by weight; whole once they are reduced.
        scales: what restores the values of each block, by weight.
    """

    def __init__(self, weights: Mapping[str, Held], dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype = weights, dtype
        tables = {name: _table(each) for name, each in weights.items()}
        numel = sum(map(math.prod, tables.values()))
        self._largest, self._scales = (torch.zeros(numel, device=device) for _ in range(2))
        sizes = [math.prod(shape) for shape in tables.values()]
        self.largest, self.scales = (
            {name: part.view(tables[name]) for name, part in zip(tables, flat.split(sizes), strict=True)}
            for flat in (self._largest, self._scales)
        )
        for name, each in weights.items():
            each.stored.gemm.hold_scales(self.scales[name], dtype)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The scales of all weights, and the largest values that they are made of."""
        return self._scales, self._largest

    @property
    def all_largest(self) -> Tensor:
        """Largest values of all weights, 1-D."""
        return self._largest

    @torch.no_grad()
    def measure(self, main: Tensor) -> None:
        """Take the largest values of this rank's shard of the master weights; those of other blocks are 0."""
        self._largest.zero_()
        for name, each in self.weights.items():
            for piece in _pieces(each):
                self.largest[name][piece.at] = largest_of_blocks(self._values(each, piece, main), piece.blocks)

    @torch.no_grad()
    def quantize(self, main: Tensor, into: Tensor) -> None:
        """Write this rank's shard of the master weights to `into` as fp8, and the scales of all blocks."""
        for name, each in self.weights.items():
            gemm = each.stored.gemm
            factor, inverse = scales_of(self.largest[name], gemm.format, gemm.recipe.has_powers)
            self.scales[name].copy_(inverse)
            for piece in _pieces(each):
                values = self._values(each, piece, main)
                data = round_to_fp8(values, factor[piece.at], piece.blocks, gemm.format, gemm.recipe.has_powers)
                into[piece.where] = data.view(-1)[piece.inside]

    def operands(self, main: Tensor, own: Tensor) -> Iterator[tuple[str, Tensor, Operand]]:
        """Yield, by weight, the elements of this rank's shard in the network's dtype, and as fp8 with their scales.

        Args:
            own: the shard in fp8, as `quantize` wrote it.
        """
        for name, each in self.weights.items():
            for piece in _pieces(each):
                yield name, main[piece.where].to(self.dtype), Operand(own[piece.where], self.scales[name][piece.at])

    def _values(self, each: Held, piece: _Piece, main: Tensor) -> Tensor:
        """Return the rows of a piece in the network's dtype, with zeros for elements of other ranks."""
        values = torch.zeros(piece.rows * each.shape[1], dtype=self.dtype, device=main.device)
        values[piece.inside] = main[piece.where].to(self.dtype)
        return values.view(piece.rows, each.shape[1])


def _table(each: Held) -> tuple[int, int]:
    """Return the numbers of blocks along both dims of a weight."""
    blocks, (rows, features) = each.stored.gemm.recipe.w, each.shape
    height = blocks.rows or rows // each.stored.num_matrices
    return rows // height, features // (blocks.summed or features)


def _pieces(each: Held) -> Iterator[_Piece]:
    """Yield the rows that this rank has elements of: all together, or where blocks are matrices of each matrix."""
    blocks, (rows, width) = each.stored.gemm.recipe.w, each.shape
    start, stop = each.start, each.start + each.where.stop - each.where.start
    matrix = rows // each.stored.num_matrices
    cuts = range(0, rows, matrix) if blocks.rows is None else (0,)
    for top in cuts if start < stop else ():
        bottom = top + matrix if blocks.rows is None else rows
        low, high = max(start, top * width), min(stop, bottom * width)
        if low < high:
            step = blocks.rows or 1
            first, last = low // width // step * step, -(-high // (width * step)) * step
            height = blocks.rows or last - first
            place = first // (blocks.rows or matrix)
            yield _Piece(
                last - first,
                Blocks(height, blocks.summed),
                slice(place, place + (last - first) // height),
                slice(low - first * width, high - first * width),
                slice(each.where.start + low - start, each.where.start + high - start),
            )
