"""Where the logical tensors lie inside a parameter's local tensor.

    local rows, parts q and k, two blocks:      q run 0 | k run 0 | q run 1 | k run 1

A part's box is cut along dim 0 into one run per block; each run is a plain view, so whatever fills the views (initial
values, a checkpoint) fills the parameter.
"""

from __future__ import annotations

from torch import Tensor

from megatron3d.layout import Box, ParamSpec, Part, box_shape
from megatron3d.mesh import Mesh


def part_views(spec: ParamSpec, local: Tensor, mesh: Mesh) -> list[tuple[Part, Box, Tensor]]:
    """Every run of every part held by `local`: its part, its box in the logical tensor, and a view without autograd.

    Boxes end at the logical shape: padding is in no view, and a run that is all padding is left out.  Together the
    views of all ranks that differ along the axes of the layout cover each logical tensor exactly once.
    """
    assert tuple(local.shape) == spec.local_shape(mesh), f"{tuple(local.shape)} is not {spec.local_shape(mesh)}"
    boxes = spec.part_boxes(mesh)
    rows = [box_shape(part_box)[0] for part_box in boxes]
    assert all(n % spec.blocks == 0 for n in rows), f"{spec.blocks} blocks do not divide rows {rows} of {spec.parts}"
    views, row = [], 0
    for block in range(spec.blocks):
        for part, ((low, _), *others), n in zip(spec.parts, boxes, rows, strict=True):
            run = n // spec.blocks
            start = low + block * run
            clipped = _clip(((start, start + run), *others), part.shape)
            inside = tuple(slice(0, size) for size in box_shape(clipped))
            if all(size > 0 for size in box_shape(clipped)):
                views.append((part, clipped, local.detach()[row : row + run][inside]))
            row += run
    return views


def _clip(part_box: Box, shape: tuple[int, ...]) -> Box:
    """The box without padding, which lies behind the logical shape."""
    return tuple((low, max(low, min(high, size))) for (low, high), size in zip(part_box, shape, strict=True))
