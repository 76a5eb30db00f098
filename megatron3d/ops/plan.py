"""Plans of operations: the chunks of tokens of the loss, and changes of an activation's layout.

A chunk of few tokens makes small GEMMs, and reads and writes the fp32 main_grad of the head once more.  On GPUs a chunk
is therefore as large as its memory allows; on CPUs it has a number of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from megatron3d.parallel.layout import Layout
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic
from megatron3d.parallel.mesh import Axes, Mesh

# A GEMM computes tiles of this many rows.
_TILE_ROWS = 128


@dataclass(frozen=True)
class LossChunk:
    """Largest chunk of the loss: a number of tokens, or bytes of logits if `num_bytes` is given.

    Attributes:
        tokens: tokens after the all-gather of X.
        num_bytes: bytes of one rank's logits in fp32, or wider.
    """

    tokens: int = 1024
    num_bytes: float | None = None

    def rows(self, num_rows: int, token_bytes: int, plan: MatmulPlan, mesh: Mesh) -> int:
        """Return the rows of the stored X in a chunk, a number that the scatter of Y divides.

        Chunks limited by bytes are of even size, in whole tiles of a GEMM where these fit.

        Args:
            num_rows: rows of this rank's stored X.
            token_bytes: bytes of the logits of one token on one rank, before the scatter of Y.
        """
        gathered, scattered = (mesh.size(axes) for axes in token_moves(plan))
        unit = scattered // math.gcd(gathered, scattered)
        if self.num_bytes is None:
            return max(self.tokens // (gathered * unit), 1) * unit
        most = max(int(self.num_bytes // (token_bytes * gathered * unit)), 1) * unit
        num_chunks = max(-(-num_rows // most), 1)
        even, tile = -(-num_rows // num_chunks), math.lcm(unit, _TILE_ROWS)
        tiled = _round_up(even, tile)
        return max(tiled if tiled <= most else _round_up(even, unit), unit)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


CPU_LOSS_CHUNK, GPU_LOSS_CHUNK = LossChunk(), LossChunk(num_bytes=2**30)
# Of a framework that computes all logits of a microbatch at once.
WHOLE_LOSS = LossChunk(tokens=2**62)


def token_moves(plan: MatmulPlan) -> tuple[Axes, Axes]:
    """Return the axes over which tokens of X are all-gathered, and those over which tokens of Y are scattered."""
    gathered = tuple(axis for axis, dim in plan.x.items() if dim == "M")
    return gathered, tuple(axis for axis, dim in plan.y.items() if dim == "M")


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
