"""Attention heads that a rank holds, and the axes over which key/value heads and latents must be all-gathered.

Query heads are sharded evenly.  With grouped queries (GQA, Ainslie et al. 2023, arXiv:2305.13245) the features of all
key/value heads are sharded evenly: where there are fewer key/value heads than ranks, a shard ends within a head, and
keys and values are all-gathered over some axes.

Narrow features of the residual stream are made whole: the rotary key that all heads share, and in generation the
latents of keys and values (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).  Attention needs all of them for its inner
tokens:

    forward     all-gather as X of an `expand` matmul; all-gather features over k; keep own rows where k splits tokens
    backward    all-gather the rows again; reduce-scatter over k where it splits heads, else keep the own features;
                reduce as dX of an `expand` matmul

So the gradient is summed over exactly the axes that split heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, Traffic, flows, moves
from megatron3d.parallel.mesh import Axes, Mesh


class Placed(Protocol):
    """Anything with a mesh, such as a communicator."""

    @property
    def mesh(self) -> Mesh:
        """Mesh of ranks, seen from this one."""
        ...


@dataclass(frozen=True)
class HeadSplit:
    """Heads of one rank; `axes` shard the query heads, and the features of all key/value heads, evenly."""

    num_heads: int
    num_groups: int
    size: int
    axes: Axes
    comm: Placed

    @cached_property
    def query_span(self) -> tuple[int, int]:
        """Query heads of this rank, a half-open range."""
        return span(self.num_heads, self.axes, self.comm.mesh)

    def _groups(self, rank: int) -> tuple[int, int]:
        low, high = span(self.num_heads, self.axes, self.comm.mesh.at(rank))
        return self._group(low), self._group(high - 1) + 1

    def _group(self, head: int) -> int:
        return head * self.num_groups // self.num_heads

    @cached_property
    def group_span(self) -> tuple[int, int]:
        """Key/value heads that this rank's query heads attend with, a half-open range."""
        return self._groups(self.comm.mesh.rank)

    @cached_property
    def gather_axes(self) -> Axes:
        """Fewest trailing axes over which keys and values must be all-gathered, the same on every rank."""
        mesh, width = self.comm.mesh, self.num_groups * self.size
        for start in range(len(self.axes), -1, -1):
            kept, gathered = self.axes[:start], self.axes[start:]
            if all(self._holds_groups(rank, span(width, kept, mesh.at(rank))) for rank in mesh.ranks(self.axes)):
                return gathered
        raise AssertionError("keys and values gathered over every axis are whole")

    def _holds_groups(self, rank: int, features: tuple[int, int]) -> bool:
        """Return whether a range of key features contains all groups that a rank's queries need."""
        first, last = self._groups(rank)
        return features[0] <= first * self.size and last * self.size <= features[1]

    @cached_property
    def group_of_query(self) -> list[int]:
        """For each query head of this rank, the index of its key/value head in `group_span`."""
        return [self._group(head) - self.group_span[0] for head in range(*self.query_span)]

    @cached_property
    def are_even(self) -> bool:
        """Whether each key/value head of this rank serves equally many consecutive query heads."""
        num_heads, num_groups = len(self.group_of_query), self.group_span[1] - self.group_span[0]
        ratio = max(num_heads // num_groups, 1)
        return self.group_of_query == [head // ratio for head in range(num_heads)] and num_heads % num_groups == 0


def row_axes(plan: MatmulPlan) -> Axes:
    """Return the axes of k that split the tokens of the inner stream."""
    return tuple(axis for axis, dim in plan.y.items() if dim == "M")


def latent_axes(plan: MatmulPlan) -> tuple[Axes, ...]:
    """Return the sets of axes that these collectives use besides those of the matmul."""
    return (plan.k, row_axes(plan), *(step.axes for step in moves(plan.y) if step.dim == "N"))


def latent_traffic(
    plan: MatmulPlan, mesh: Mesh, tokens: int, size: int, itemsize: int, backward: bool
) -> list[Traffic]:
    """Return the collectives that make `size` features of all `tokens` whole, or those of their gradient."""
    sent, plan = flows(plan, mesh, tokens, 1, size, itemsize), plan.on(mesh)
    whole_bytes = tokens / mesh.size(plan.m) * size * itemsize

    def part(collective: str, axes: Axes) -> list[Traffic]:
        ranks = mesh.size(axes)
        return [Traffic(collective, axes, whole_bytes * (ranks - 1) / ranks)] if axes else []

    if not backward:
        return [*sent.gather_x, *part("all_gather", plan.k)]
    calls = part("all_gather", row_axes(plan))
    for step in moves(plan.y):
        calls += part("reduce_scatter", step.axes) if step.dim == "N" else []
        whole_bytes /= mesh.size(step.axes)
    return [*calls, *sent.reduce_dx]
