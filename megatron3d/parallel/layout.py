"""Which mesh axes split each dimension of a tensor, and what follows from it.

A layout is a tuple of axes per dimension, major first: `(("x", "y"), ("z",))` splits dim 0 over x and then y, dim 1
over z.  Axes that a layout does not name hold copies.  Boxes are cut axis by axis, each time in equal pieces of
ceil(size / n), so that the last pieces may be short or empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron3d.parallel.mesh import Axes, Mesh

Layout = tuple[Axes, ...]
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def layout_axes(layout: Layout) -> frozenset[str]:
    """Every axis that splits some dimension."""
    return frozenset(axis for axes in layout for axis in axes)


def span(size: int, axes: Axes, mesh: Mesh) -> tuple[int, int]:
    """My half-open range of a dimension of `size` that `axes` split."""
    low, high = 0, size
    for axis in axes:
        step = -(-(high - low) // mesh.sizes[axis])
        start = min(low + mesh.coord(axis) * step, high)
        low, high = start, min(start + step, high)
    return low, high


def box(shape: Shape, layout: Layout, mesh: Mesh) -> Box:
    """My part of a global tensor: one half-open range per dimension."""
    assert len(shape) == len(layout), f"shape {shape} and layout {layout} have different lengths"
    return tuple(span(size, axes, mesh) for size, axes in zip(shape, layout, strict=True))


def box_shape(part: Box) -> Shape:
    """Number of elements per dimension of a box."""
    return tuple(high - low for low, high in part)


def num_copies(layout: Layout, mesh: Mesh, shared: Iterable[str]) -> int:
    """How many ranks along the axes `shared` hold the same box."""
    held = layout_axes(layout)
    return mesh.size(axis for axis in shared if axis not in held)


@dataclass(frozen=True)
class Part:
    """One logical tensor: its name and global shape, and the shape after padding that is really split."""

    name: str
    shape: Shape
    padded_shape: Shape


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as stored: one logical tensor, or several of one layout joined along dim 0 (q, k and v; gate and up).

    With `blocks` above 1, dim 0 of the local tensor is that many blocks, each holding its share of every part; then a
    later split of dim 0 into `blocks` pieces still finds whole shares of every part.

    Attributes:
        layout: axes per dimension, equal for all parts.
        token_axes: axes that split the tokens (or rows) where the parameter is used.
        init: standard deviation of the normal initial values; for constant ones, `init=0` and `fill`.
        decay: whether weight decay applies.
        uses: how often a microbatch adds to the gradient; a tied embedding is also the head.
        holders: coordinates along the pipeline of the ranks that hold the parameter, the one that writes it first.
    """

    parts: tuple[Part, ...]
    layout: Layout
    token_axes: Axes
    init: float = 0.0
    fill: float = 0.0
    decay: bool = True
    blocks: int = 1
    uses: int = 1
    holders: tuple[int, ...] = (0,)

    def part_boxes(self, mesh: Mesh) -> tuple[Box, ...]:
        """My box of every part, in padded coordinates."""
        return tuple(box(part.padded_shape, self.layout, mesh) for part in self.parts)

    def local_shape(self, mesh: Mesh) -> Shape:
        """Shape of the local tensor."""
        shapes = [box_shape(part) for part in self.part_boxes(mesh)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def reduce_axes(self, mesh: Mesh) -> Axes:
        """Gradient rule: the axes that split the tokens where I am used and do not split me (and, beside these, the
        holders)."""
        return mesh.nontrivial(mesh.in_order(set(self.token_axes) - layout_axes(self.layout)))
