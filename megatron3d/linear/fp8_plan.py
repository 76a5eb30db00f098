"""Recipes of fp8: how operands are scaled, which linears multiply in fp8, and what it communicates.

Values are stored as fp8 data times a scale per block, the largest that keeps the block's largest value representable:

    recipe      block of X and dY    block of W    scales                          source
    blockwise   1 x 128              128 x 128     powers of 2, fp32               DeepSeek-AI, arXiv:2412.19437, 3.3
    tensorwise  whole tensor         whole tensor  fp32                            Micikevicius et al., arXiv:2209.05433
    rowwise     row                  row           powers of 2, fp32               torchao's recipe of this name
    mxfp8       1 x 32               1 x 32        powers of 2, e8m0, one byte     OCP Microscaling Formats 1.0

Rows run along the dim that a GEMM sums (`fp8.py`).  Blocks of the whole tensor or of a row are those of the global
tensor of a microbatch: their largest values are reduced over the axes that split them.  Blocks of 128 or 32 lie within
shards, which `config/validate/fp8.py` sees to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Traffic, flows, gathers, moves, ring
from megatron3d.parallel.mesh import Axes, Mesh


class Blocks(NamedTuple):
    """Rows and summed features of a block that shares a scale; None: all of the dim, in every layout."""

    rows: int | None
    summed: int | None

    @property
    def transposed(self) -> Blocks:
        """Return the blocks of the transposed tensor."""
        return Blocks(self.summed, self.rows)

    @property
    def is_square(self) -> bool:
        """Return whether the blocks of the transposed tensor are those of the tensor."""
        return self.rows == self.summed


@dataclass(frozen=True)
class Recipe:
    """How the operands of a GEMM are scaled.

    Attributes:
        x: blocks of X and dY; w: blocks of W.
        has_powers: scales are powers of 2; scale_bytes: size of a stored scale.
        sends_dy: dY is quantized before it is all-gathered; else after, along both dims.
    """

    x: Blocks
    w: Blocks
    has_powers: bool = True
    scale_bytes: int = 4
    sends_dy: bool = True

    @property
    def block(self) -> int | None:
        """Return the size of the blocks that must lie within shards; None: the recipe has none."""
        return self.x.summed


RECIPES: Mapping[str, Recipe] = {
    "blockwise": Recipe(Blocks(1, 128), Blocks(128, 128)),
    "tensorwise": Recipe(Blocks(None, None), Blocks(None, None), has_powers=False),
    "rowwise": Recipe(Blocks(1, None), Blocks(1, None), sends_dy=False),
    "mxfp8": Recipe(Blocks(1, 32), Blocks(1, 32), scale_bytes=1, sends_dy=False),
}


# First compute capability of NVIDIA GPUs with a kernel for operands of a recipe whose values are in bf16.  On
# others, and on CPUs, operands are dequantized and multiplied in the network's dtype, or in fp32.
Capability = tuple[int, int]
CAPABILITIES: Mapping[str, Capability] = {
    "blockwise": (9, 0),
    "tensorwise": (8, 9),
    "rowwise": (8, 9),
    "mxfp8": (10, 0),
}


def has_kernel(recipe_name: str, capability: Capability | None, precision: str) -> bool:
    """Return whether a GPU multiplies fp8 operands of a recipe; None: a device of another kind."""
    return precision == "bf16" and capability is not None and capability >= CAPABILITIES[recipe_name]


class Formats(NamedTuple):
    """Formats of X and W, and of dY."""

    x: str
    dy: str


FORMATS: Mapping[str, Formats] = {"e4m3": Formats("e4m3", "e4m3"), "hybrid": Formats("e4m3", "e5m2")}


@dataclass(frozen=True)
class Fp8:
    """Fp8 of a run: recipe, formats, and the linears of layers that multiply in fp8.

    Attributes:
        recipe_name: key of `RECIPES`; formats_name: key of `FORMATS`.
        wide_layers: indices of layers whose linears keep the network's dtype; wide: patterns of linears that do.
        stores_weights: weights are quantized once per step, and stored and all-gathered over ZeRO's axes as fp8.
    """

    recipe_name: str
    formats_name: str
    wide_layers: frozenset[int] = frozenset()
    wide: Sequence[str] = ()
    stores_weights: bool = False

    @property
    def recipe(self) -> Recipe:
        """Return the recipe."""
        return RECIPES[self.recipe_name]

    @property
    def formats(self) -> Formats:
        """Return the formats."""
        return FORMATS[self.formats_name]

    def takes(self, path: str) -> bool:
        """Return whether a linear, by its path such as layers.3.mlp.fc1, multiplies in fp8."""
        owner, index, *_ = path.split(".")
        is_wide = owner == "layers" and int(index) in self.wide_layers
        return not is_wide and not any(fnmatchcase(path, pattern) for pattern in self.wide)


def packed_bytes(recipe: Recipe, num_features: int) -> int:
    """Return the bytes of a row that is sent as fp8 with its scales."""
    return num_features + num_features // (recipe.block or num_features) * recipe.scale_bytes


def reduced_axes(blocks: Blocks, layout: Layout, mesh: Mesh) -> Axes:
    """Return the axes over which the largest values of blocks are reduced: those of the dims that a block is all of."""
    return mesh.nontrivial(axis for size, axes in zip(blocks, layout, strict=True) if size is None for axis in axes)


def largest_value_axes(recipe: Recipe, plan: MatmulPlan, mesh: Mesh) -> list[Axes]:
    """Return the sets of axes over which a linear of a plan without axes of size 1 reduces largest values."""
    x, y = plan.x_layout, plan.y_layout if recipe.sends_dy else (plan.m, plan.n)
    found = [reduced_axes(recipe.x, layout[::step], mesh) for layout in (x, y) for step in (1, -1)]
    found += [reduced_axes(recipe.w, plan.w_layout[::step], mesh) for step in (1, -1)]
    return list(dict.fromkeys(axes for axes in found if axes))


# Dims of X, W and dY as they are stored.
_STORED = ("MK", "NK", "MN")
# Largest values are found, and reduced, in fp32.
LARGEST_BYTES = 4


class OperandSize(NamedTuple):
    """Elements of a quantized operand, or of a shard of it, and its scales."""

    numel: int
    num_scales: int
    scale_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of data and scales."""
        return self.numel + self.num_scales * self.scale_bytes


def operand_size(recipe: Recipe, blocks: Blocks, rows: float, summed: float) -> OperandSize:
    """Return the size of an operand [rows, summed] in blocks."""
    return OperandSize(round(rows * summed), round(num_blocks(blocks, rows, summed)), recipe.scale_bytes)


def num_blocks(blocks: Blocks, rows: float, summed: float) -> float:
    """Return the blocks of [rows, summed] elements."""
    counts = (1 if size is None else whole / size for size, whole in zip(blocks, (rows, summed), strict=True))
    return math.prod(counts)


def blocks_of_weight(recipe: Recipe, rows: int, features: int, num_matrices: int = 1) -> int:
    """Return the blocks of a rank's part of a weight, or of as many matrices of equal size one below the other."""
    return round(num_matrices * num_blocks(recipe.w, rows / num_matrices, features))


class Quantization(NamedTuple):
    """Quantization of an operand.

    Attributes:
        source: what a kernel that quantizes in one pass reads: the values, the other form of the operand, which is fp8
            already, or nothing, since that pass makes both forms.
        is_weight: it is W.
    """

    size: OperandSize
    source: str = "values"
    is_weight: bool = False

    def moved_bytes(self, itemsize: int) -> int:
        """Return the bytes that a kernel reads and writes."""
        read = {"values": itemsize, "other form": 1, "same pass": 0}[self.source]
        return read * self.size.numel + self.size.num_bytes


@dataclass(frozen=True)
class QuantizedMatmul:
    """One matmul of a recipe with global sizes m, n, k, by a plan without axes of size 1.

    Operands are named by their dims, rows before the summed one: MK, NK, MN as forward and dgrad multiply them, and KN,
    NM, KM as dgrad and wgrad do.

    Attributes:
        stores_w: W is stored in fp8 (`Fp8.stores_weights`), of which backward takes the transpose.
    """

    recipe: Recipe
    plan: MatmulPlan
    mesh: Mesh
    m: int
    n: int
    k: int
    stores_w: bool = False

    def stored(self, dims: str) -> OperandSize:
        """Return the shard of an operand that this rank quantizes where it is stored."""
        return self._size(dims, self._layout(dims))

    def multiplied(self, dims: str) -> OperandSize:
        """Return an operand as this rank multiplies it."""
        return self._size(dims, self._split(dims))

    def flows(self, itemsize: int, wgrad_itemsize: int | None = None) -> Flows:
        """Return the collectives; those of results, and of dY that is not quantized before, have `itemsize`.

        Data have one byte per element.  Scales are all-gathered along dims that have several blocks, and largest values
        reduced along the others.
        """
        plan, recipe = self.plan, self.recipe
        wide = flows(plan, self.mesh, self.m, self.n, self.k, itemsize, wgrad_itemsize=wgrad_itemsize)
        of_w, of_turned_w = ([], []) if self.stores_w else (self._reduced("NK"), self._reduced("KN"))
        forward, backward = [*self._reduced("MK"), *of_w], of_turned_w
        backward += self._reduced("MN", self._layout("MN") if recipe.sends_dy else self._split("MN"))
        if not recipe.x.is_square:
            forward += self._reduced("KM")
            backward += self._reduced("NM", self._split("NM"))
        return wide._replace(
            gather_x=self._gathered("MK", plan.x),
            gather_w=self._gathered("NK", plan.w),
            gather_dy=self._gathered("MN", plan.dy) if recipe.sends_dy else wide.gather_dy,
            x_again=self._gathered("KM", plan.x),
            w_again=self._gathered("KN", plan.w),
            scales=forward,
            scales_back=backward,
        )

    @property
    def by_rows(self) -> QuantizedMatmul:
        """The matmul with X and dY quantized by rows, as those of experts (`fp8_rows.py`)."""
        return replace(self, recipe=replace(self.recipe, x=Blocks(1, self.recipe.x.summed)))

    def flows_of_rows(self, num_matrices: int) -> tuple[list[Traffic], list[Traffic]]:
        """Return the all-reduces of largest values of all rows, and of as many matrices, in forward and in backward."""
        of_w, of_turned_w = ([], []) if self.stores_w else (self._reduced("NK"), self._reduced("KN"))
        forward, backward = self._reduced("MK"), self._reduced("MN", self._split("MN"))
        return forward + num_matrices * of_w, backward + num_matrices * of_turned_w

    def quantizations(self) -> tuple[Sequence[Quantization], Sequence[Quantization]]:
        """Return what forward quantizes, and what backward does."""
        recipe = self.recipe
        again = "other form" if recipe.x.is_square else "same pass"
        forward = (
            Quantization(self.stored("MK")),
            Quantization(self.stored("KM"), again),
            Quantization(self.stored("NK"), is_weight=True),
        )
        dy = self.stored("MN") if recipe.sends_dy else self.multiplied("MN")
        turned = Quantization(self.multiplied("NM"), "other form" if recipe.sends_dy else "same pass")
        if self.stores_w:
            return forward[:-1], (Quantization(self.stored("KN"), "other form", True), Quantization(dy), turned)
        return forward, (Quantization(self.stored("KN"), is_weight=True), Quantization(dy), turned)

    def _blocks(self, dims: str) -> Blocks:
        return self.recipe.w if set(dims) == {"N", "K"} else self.recipe.x

    def _layout(self, dims: str) -> Layout:
        layouts = {"MK": self.plan.x_layout, "NK": self.plan.w_layout, "MN": self.plan.y_layout}
        return layouts[dims] if dims in layouts else layouts[dims[::-1]][::-1]

    def _split(self, dims: str) -> Layout:
        split = {"M": self.plan.m, "N": self.plan.n, "K": self.plan.k}
        return split[dims[0]], split[dims[1]]

    def _size(self, dims: str, layout: Layout) -> OperandSize:
        whole = {"M": self.m, "N": self.n, "K": self.k}
        rows, summed = (whole[dim] / self.mesh.size(axes) for dim, axes in zip(dims, layout, strict=True))
        return operand_size(self.recipe, self._blocks(dims), rows, summed)

    def _gathered(self, dims: str, table: Mapping[str, str]) -> list[Traffic]:
        """Return the all-gathers of data, and of scales along the dims that have several blocks."""
        size, blocks = self.multiplied(dims), self._blocks(dims)
        varying = {axis: dim for axis, dim in table.items() if blocks[dims.index(dim)] is not None}
        data = gathers(moves(table), size.numel, self.mesh)
        return data + gathers(moves(varying), size.num_scales * size.scale_bytes, self.mesh)

    def _reduced(self, dims: str, layout: Layout | None = None) -> list[Traffic]:
        """Return the all-reduce of the largest values of an operand where it is stored, or in another layout."""
        layout, blocks = layout or self._layout(dims), self._blocks(dims)
        num_bytes = self._size(dims, layout).num_scales * LARGEST_BYTES
        if dims not in _STORED:  # values are found in the order of dims in which they are stored
            layout, blocks = layout[::-1], blocks.transposed
        axes = reduced_axes(blocks, layout, self.mesh)
        return [ring("all_reduce", axes, num_bytes, self.mesh)] if axes else []
