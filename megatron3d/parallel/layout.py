"""Layouts: which mesh axes split each dim of a tensor, and the box of index ranges that each rank then holds.

A layout is a tuple of axes per dim, major first: `(("x", "y"), ("z",))` splits dim 0 over x and then y, dim 1 over z.
The tensor is replicated over the axes that a layout does not name.  Each axis splits a range into n parts of
ceil(size / n), so the last parts may be shorter or empty.

Training state is sharded further over the data axis by ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054):

    stage  optimizer state   gradients   parameters
    0      replicated        replicated  replicated
    1      sharded           replicated  replicated
    2      sharded           sharded     replicated
    3      sharded           sharded     sharded
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron3d.parallel.mesh import Axes, Mesh

Layout = tuple[Axes, ...]
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def layout_axes(layout: Layout) -> frozenset[str]:
    """Return all axes that split some dim."""
    return frozenset(axis for axes in layout for axis in axes)


def span(size: int, axes: Axes, mesh: Mesh) -> tuple[int, int]:
    """Return this rank's half-open range of a dim of `size` that is split over `axes`."""
    low, high = 0, size
    for axis in axes:
        step = -(-(high - low) // mesh.sizes[axis])
        start = min(low + mesh.coord(axis) * step, high)
        low, high = start, min(start + step, high)
    return low, high


def box(shape: Shape, layout: Layout, mesh: Mesh) -> Box:
    """Return the box of a global tensor that this rank holds: one half-open range per dim."""
    assert len(shape) == len(layout), f"shape {shape} and layout {layout} have different lengths"
    return tuple(span(size, axes, mesh) for size, axes in zip(shape, layout, strict=True))


def box_shape(part: Box) -> Shape:
    """Return the number of elements of a box along each dim."""
    return tuple(high - low for low, high in part)


def num_copies(layout: Layout, mesh: Mesh, shared: Iterable[str]) -> int:
    """Return how many ranks along the axes `shared` hold the same box."""
    held = layout_axes(layout)
    return mesh.size(axis for axis in shared if axis not in held)


@dataclass(frozen=True)
class Part:
    """One logical tensor: its name, its global shape, and the padded shape that is sharded."""

    name: str
    shape: Shape
    padded_shape: Shape


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as stored: one logical tensor, or several of one layout concatenated along dim 0 (q, k, v; gate, up).

    With `blocks` above 1, dim 0 of the local tensor consists of that many blocks with a shard of every part each, so
    that splitting dim 0 further into `blocks` pieces leaves whole shards of every part.

    Attributes:
        layout: mesh axes per dim, the same for all parts.
        token_axes: axes that split the tokens (rows of the matmul) where the parameter is used.
        init: standard deviation of normally distributed initial values; constant ones have `init=0` and `fill`.
        decay: whether weight decay applies.
        lr_mult: factor of the learning rate.
        uses: contributions of a microbatch to the gradient; 2 where embedding and head are tied on one rank.
        holders: pipeline ranks that hold the parameter; the first one writes it to checkpoints.
        part_axes: axes over which the list of parts is sharded: each rank holds whole ones (experts).
    """

    parts: tuple[Part, ...]
    layout: Layout
    token_axes: Axes
    init: float = 0.0
    fill: float = 0.0
    decay: bool = True
    lr_mult: float = 1.0
    blocks: int = 1
    uses: int = 1
    holders: tuple[int, ...] = (0,)
    part_axes: Axes = ()

    @property
    def axes(self) -> frozenset[str]:
        """All axes that shard the parameter."""
        return layout_axes(self.layout) | set(self.part_axes)

    def held_parts(self, mesh: Mesh) -> tuple[Part, ...]:
        """Return the parts of which this rank holds a shard or all."""
        low, high = span(len(self.parts), self.part_axes, mesh)
        return self.parts[low:high]

    def part_boxes(self, mesh: Mesh) -> tuple[Box, ...]:
        """Return the box of every part that this rank holds, in padded coordinates."""
        return tuple(box(part.padded_shape, self.layout, mesh) for part in self.held_parts(mesh))

    def num_copies(self, mesh: Mesh, shared: Iterable[str]) -> int:
        """Return how many ranks along the axes `shared` hold the same elements."""
        return mesh.size(mesh.without(shared, self.axes))

    def local_shape(self, mesh: Mesh) -> Shape:
        """Return the shape of the local tensor."""
        shapes = [box_shape(part) for part in self.part_boxes(mesh)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def reduce_axes(self, mesh: Mesh) -> Axes:
        """Return the axes over which the gradient is reduced: those that split the tokens where the parameter is used
        and do not split the parameter.  Tied embeddings are also reduced between their holders."""
        return mesh.nontrivial(mesh.in_order(mesh.without(self.token_axes, self.axes)))


# MiB of a bucket of gradients by default.  On GPUs the time of smaller ones is their ring's latency, which grows with
# its ranks; Megatron-LM's default is as large (40M parameters, or 1M per data-parallel rank, of 4 bytes each).
_CPU_BUCKET_MB = 25.0
_GPU_BUCKET_MB, _GPU_BUCKET_MB_PER_RANK = 160.0, 4.0


def bucket_bytes(bucket_mb: float | None, data_ranks: int, on_gpu: bool) -> float:
    """Return the least bytes of gradients that are reduced together, with the default of the device for None."""
    if bucket_mb is None:
        bucket_mb = max(_GPU_BUCKET_MB, _GPU_BUCKET_MB_PER_RANK * data_ranks) if on_gpu else _CPU_BUCKET_MB
    return bucket_mb * 2**20


SHARD_MULTIPLE, LEAST_ALIGNED = 128, 2**13
"""Elements that the length of a flat shard is a multiple of, from this length on: NCCL and vectorized kernels are fast
where a shard begins at a multiple of 16 bytes.  Shorter shards would be mostly padding, and take a latency anyway."""


def shard_numel(size: int, num_shards: int) -> int:
    """Return the elements of each of some equal shards of a flat tensor, padding included."""
    part = -(-size // num_shards)
    is_short = num_shards == 1 or part < LEAST_ALIGNED
    return part if is_short else -(-part // SHARD_MULTIPLE) * SHARD_MULTIPLE


@dataclass(frozen=True)
class Sharding:
    """State that is sharded, and the axes it is sharded over; without axes it is replicated (ZeRO stage 0).

    Attributes:
        axes: mesh axes over which the optimizer state is sharded.
        grads: gradients are sharded over them, too.
        params: parameters are sharded over them, too.
    """

    axes: Axes = ()
    grads: bool = False
    params: bool = False

    def without(self, axes: Iterable[str], mesh: Mesh) -> Sharding:
        """Return the sharding over the other axes, of parameters that `axes` shard themselves."""
        return replace(self, axes=mesh.without(self.axes, axes))

    @staticmethod
    def of_stage(zero_stage: int, axes: Axes) -> Sharding:
        """Return what a ZeRO stage shards over `axes`; nothing at stage 0 and without axes."""
        is_sharded = bool(axes) and zero_stage > 0
        return Sharding(axes if is_sharded else (), is_sharded and zero_stage >= 2, is_sharded and zero_stage >= 3)
