"""Time of a collective: latency per step, and bytes over the slowest level that its ring crosses.

    ring over n ranks    steps alpha + sent bytes / min over crossed levels of (members per unit below x link per rank)

Concurrent groups share a node's links; a group with several members in a node leaves it by the links of all of them
(Thakur, Rabenseifner and Gropp 2005; NCCL's rings).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron3d.analysis.cost_model.fitted_terms import NEUTRAL, FittedTerms
from megatron3d.analysis.cost_model.hardware import Cluster, NetworkLevel
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Axes, Mesh


@dataclass(frozen=True)
class Network:
    """A cluster's links for the ranks of a mesh, which are numbered from node to node.

    Attributes:
        slowdown: factor by which ranks that share CPU cores are slower.
        fitted: fitted terms of the framework whose collectives run.
    """

    cluster: Cluster
    slowdown: float = 1.0
    fitted: FittedTerms = NEUTRAL

    def seconds(self, call: Traffic, mesh: Mesh) -> float:
        """Return the seconds of one collective of a mesh, or of a send/recv to a neighbour."""
        if call.collective in ("send", "add", "shift"):
            return self.transfer_s(call.wire_bytes, mesh, call.axes)
        members = self._members(mesh, call.axes)
        ranks = members[-1]
        if ranks == 1:
            return 0.0
        rounds = 2 if call.collective == "all_reduce" else 1
        latency_s = (self.cluster.call_us + self.fitted.call_us) * 1e-6 + self._latency_s(members, rounds)
        bytes_s = self._byte_factor(members) * call.wire_bytes / self._bottleneck(members)[0]
        return self._shared(latency_s, bytes_s, ranks / mesh.world_size)

    def transfer_s(self, num_bytes: float, mesh: Mesh, axes: Axes) -> float:
        """Return the seconds of a send from each rank to its neighbour along an axis."""
        members = self._members(mesh, axes)
        # The neighbour that is farthest away counts: some rank has it.
        crossed = [level for level, count in zip(self.cluster.levels, members, strict=True) if count > 1]
        level = (crossed or self.cluster.levels)[-1]
        latency_s = (level.latency_us + self.fitted.call_us) * 1e-6
        bytes_s = self._byte_factor(members) * num_bytes / (level.gb_s * 1e9)
        return self._shared(latency_s, bytes_s, min(2 / mesh.world_size, 1.0))

    @cached_property
    def _known_members(self) -> dict[tuple[object, object, Axes], list[int]]:
        return {}

    def _members(self, mesh: Mesh, axes: Axes) -> list[int]:
        """Return `members_by_level`, which the search of a planner asks for a hundred thousand times."""
        key = mesh.axes, mesh.pieces, axes
        if key not in self._known_members:
            self._known_members[key] = members_by_level(self.cluster, mesh, axes)
        return self._known_members[key]

    def _byte_factor(self, members: list[int]) -> float:
        """Return the fitted time of bytes relative to the links': it grows with the nodes of a group."""
        nodes = _num_nodes(members)
        return self.fitted.outer * nodes**self.fitted.fall if nodes > 1 else self.fitted.inner

    def _shared(self, latency_s: float, bytes_s: float, part: float) -> float:
        """Return the seconds of a collective of a fraction `part` of all ranks, which share CPU cores.

        Its CPU work slows down, and so does that of the ranks that it waits for in each step; while bytes are in
        flight, all ranks compute.  Measured with 2, 4 and 8 ranks on 2 cores, in groups of all ranks and of pairs.
        """
        slowdown, least = self.slowdown, 1 / self.slowdown
        busy, waits = self.cluster.call_busy, max(slowdown * part**2, least)
        latency_s *= busy * slowdown + (1 - busy) * waits
        busy, waits = self.cluster.bytes_busy, max(part, least)
        return latency_s + bytes_s * (busy * slowdown + (1 - busy) * waits)

    def num_nodes(self, mesh: Mesh, axes: Axes) -> int:
        """Return the number of nodes of a group."""
        return _num_nodes(self._members(mesh, axes))

    def bottleneck(self, mesh: Mesh, axes: Axes) -> tuple[float, NetworkLevel]:
        """Return the bytes per second of a ring along axes, and the level that limits it."""
        return self._bottleneck(self._members(mesh, axes))

    def _latency_s(self, members: list[int], rounds: int) -> float:
        """Return the latency of a ring inside the innermost level, and of a tree, or a shorter ring, over its units."""
        is_ring = rounds == 1
        total, below = is_ring * (_num_nodes(members) - 1) * self.fitted.hop_us * 1e-6, 1
        for level, count in zip(self.cluster.levels, members, strict=True):
            units = count // below
            steps = units - 1 if is_ring else min(units - 1, math.ceil(math.log2(units))) if units > 1 else 0
            total += rounds * steps * level.latency_us * 1e-6
            below = count
        return total

    def _bottleneck(self, members: list[int]) -> tuple[float, NetworkLevel]:
        found, below = [], 1
        for level, count in zip(self.cluster.levels, members, strict=True):
            if count > below:
                links = count - 1 if level.is_pairwise else below
                found.append((links * level.gb_s * 1e9, level))
            below = count
        return min(found, key=lambda each: each[0])


def _num_nodes(members: list[int]) -> int:
    """Return the number of nodes of a group by its members in one unit of each level."""
    return members[-1] // (members[-2] if len(members) > 1 else members[-1])


def members_by_level(cluster: Cluster, mesh: Mesh, axes: Axes) -> list[int]:
    """Return how many ranks of a group are in one unit of each level; the last level holds all."""
    group = sorted(mesh.at(0).ranks(axes))
    counts = [sum(rank < level.ranks for rank in group) for level in cluster.levels[:-1]]
    return [*counts, len(group)]
