"""Changes of an activation's layout: what is gathered and kept along each dim, and the bytes that this sends."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh


class DimChange(NamedTuple):
    """Change along one dim: the axes that are gathered, and then those along which this rank keeps its shard."""

    dim: int
    gathered: Axes
    kept: Axes


def dim_changes(source: Layout, target: Layout, mesh: Mesh) -> list[DimChange]:
    """Return the changes from one layout to another, features first; all dims are gathered before any is cut.

    Axes that split a dim first in both layouts stay as they are.
    """
    changes = []
    for dim in reversed(range(len(source))):
        before, after = mesh.nontrivial(source[dim]), mesh.nontrivial(target[dim])
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
        if before != after:
            changes.append(DimChange(dim, before[same:], after[same:]))
    return changes


def relayout_traffic(source: Layout, target: Layout, mesh: Mesh, whole_bytes: float) -> list[Traffic]:
    """Return the all-gathers of a change; `whole_bytes` are those of the global tensor."""
    held = whole_bytes / mesh.size(sum(source, ()))
    calls = []
    for change in dim_changes(source, target, mesh):
        ranks = mesh.size(change.gathered)
        if ranks > 1:
            calls.append(Traffic("all_gather", change.gathered, held * (ranks - 1)))
        held *= ranks
    return calls
