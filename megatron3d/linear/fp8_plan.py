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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import MatmulPlan
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
    """

    recipe_name: str
    formats_name: str
    wide_layers: frozenset[int] = frozenset()
    wide: Sequence[str] = ()

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
