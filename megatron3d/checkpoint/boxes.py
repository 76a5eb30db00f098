"""Boxes of a global tensor: what two of them share, and whether many of them cover it exactly once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from megatron3d.parallel.layout import Box, Shape


def overlap(a: Box, b: Box) -> Box | None:
    """The box that both hold; None where there is no element in both."""
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that holds `outer`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(inner, outer, strict=True))


def text(box: Box) -> str:
    """A box as it is written after a tensor's name, `[0:2,4:8]`."""
    return "[" + ",".join(f"{low}:{high}" for low, high in box) + "]"


def flaw(shape: Shape, boxes: Iterable[Box]) -> str | None:
    """The first region of a tensor that the boxes do not cover exactly once, in words; None where there is none."""
    boxes = list(boxes)
    for box in boxes:
        inside = len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if not inside:
            return f"box {text(box)} is not inside a tensor of {list(shape)}"
    uneven = _uneven(shape, boxes)
    if uneven is None:
        return None
    region, times = uneven
    return f"elements {text(region)} are in {times} boxes instead of one"


def _uneven(shape: Shape, boxes: list[Box]) -> tuple[Box, int] | None:
    """Cut the first dim at every edge; each slab must be covered once by what the boxes that cross it hold there."""
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    cuts = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    slabs: dict[int, list[Box]] = {cut: [] for cut in cuts}
    for (low, high), *others in boxes:
        for cut in cuts[bisect_left(cuts, low) : bisect_left(cuts, high)]:
            slabs[cut].append(tuple(others))
    for low, high in pairwise(cuts):
        uneven = _uneven(shape[1:], slabs[low])
        if uneven:
            region, times = uneven
            return ((low, high), *region), times
    return None
