"""From a parameter, and whatever is shaped like it, to the pieces of logical tensors that a checkpoint holds.

Names are `model.<part>`, `optimizer.exp_avg.<part>` and `optimizer.exp_avg_sq.<part>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from megatron3d.checkpoint.piece import Piece
from megatron3d.parallel.layout import ParamSpec, layout_axes
from megatron3d.parallel.logical_views import part_views
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.zero import Buffers


class ParamRange(NamedTuple):
    """Elements [start, stop) of the local tensor of a parameter."""

    name: str
    spec: ParamSpec
    start: int
    stop: int


def param_pieces(prefix: str, spec: ParamSpec, local: Tensor, mesh: Mesh, start: int = 0) -> list[Piece]:
    """The pieces of `<prefix>.<part name>` that `local` holds, without padding; their tensors are views of `local`.

    `local` is the local tensor, or a range of its elements from `start` on.
    """
    views = part_views(spec, local, mesh, start)
    return [Piece(f"{prefix}.{part.name}", part.shape, box, view) for part, box, view in views]


def ranges_to_write(buffers: Buffers) -> dict[str, ParamRange]:
    """What this rank writes of each parameter that it holds, weights and moments alike: see `shares`."""
    held = [
        ParamRange(name, buffers.specs[name], start, start + len(values))
        for name, start, values in buffers.held("main")
    ]
    return {each.name: each for each in split_among_replicas(held, buffers.comm.mesh, buffers.sharding.axes)}


def split_among_replicas(held: Iterable[ParamRange], mesh: Mesh, shared_out: Axes = ()) -> Iterator[ParamRange]:
    """Save rule: the ranks that hold the same elements each write an equal part of these, counted in elements.

        rank 0 of 3   | a a a a a b |
        rank 1 of 3               | b b b c c |           three ranks hold a, b and c
        rank 2 of 3                         | c c c c c |

    Such ranks differ along axes that are neither in the layout nor ZeRO's (`shared_out`).  What they hold, one
    parameter after another, is cut in as many parts as there are ranks, at the start of a row.  Where two ranks of the
    pipeline hold a parameter, each does this with its half.  Every rank finds its part by arithmetic.
    """
    groups: dict[Axes, list[ParamRange]] = {}
    for each in held:
        split = layout_axes(each.spec.layout) | {"pipeline", *shared_out}
        copies = tuple(axis for axis in mesh.names if axis not in split)
        groups.setdefault(copies, []).append(_of_holder(_without_padding(each, mesh), mesh))
    for copies, group in groups.items():
        yield from _part(group, mesh.index(copies), mesh.size(copies), mesh)


def _without_padding(held: ParamRange, mesh: Mesh) -> ParamRange:
    """Without the rows at the end that are padding of a parameter's only part, as the vocabulary's are."""
    spec = held.spec
    if len(spec.parts) > 1 or spec.blocks > 1:
        return held
    ((low, _), *_), (rows, *others) = spec.part_boxes(mesh)[0], spec.local_shape(mesh)
    real = min(max(spec.parts[0].shape[0] - low, 0), rows) * math.prod(others)
    return held._replace(start=min(held.start, real), stop=min(held.stop, real))


def _of_holder(held: ParamRange, mesh: Mesh) -> ParamRange:
    """The part of it that is mine among the ranks of the pipeline that hold the parameter."""
    holders = held.spec.holders
    if len(holders) == 1:
        return held
    place, numel = holders.index(mesh.coord("pipeline")), math.prod(held.spec.local_shape(mesh))
    low, high = (_row(held.spec, numel * edge // len(holders), mesh) for edge in (place, place + 1))
    start, stop = (min(max(edge, low), high) for edge in (held.start, held.stop))
    return held._replace(start=start, stop=stop)


def _part(group: list[ParamRange], index: int, ranks: int, mesh: Mesh) -> Iterator[ParamRange]:
    """Part `index` of equally many elements."""
    total = sum(each.stop - each.start for each in group)
    low, high = (total * edge // ranks for edge in (index, index + 1))
    passed = 0
    for each in group:
        start, stop = (_cut(each, each.start + edge - passed, mesh) for edge in (low, high))
        yield each._replace(start=start, stop=stop)
        passed += each.stop - each.start


def _cut(held: ParamRange, element: int, mesh: Mesh) -> int:
    """The edge of a range, or the start of a row inside of it, that is nearest below an element."""
    if element >= held.stop:
        return held.stop
    return max(_row(held.spec, element, mesh), held.start)


def _row(spec: ParamSpec, element: int, mesh: Mesh) -> int:
    """Where the row of an element begins."""
    shape = spec.local_shape(mesh)
    width = math.prod(shape[1:])
    return element if element >= math.prod(shape) or not width else element // width * width
