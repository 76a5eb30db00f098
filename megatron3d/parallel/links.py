"""Point-to-point links of the pipeline, and the order in which all ranks create them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron3d.parallel.mesh import Mesh


@dataclass(frozen=True, order=True)
class Link:
    """Two ranks that differ along one axis only: their coordinates on it, the smaller first."""

    axis: str
    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low < self.high, f"a link joins two ranks, not {self}"

    @property
    def ends(self) -> tuple[int, int]:
        """Coordinates of both ends."""
        return self.low, self.high

    def ranks(self, mesh: Mesh) -> tuple[int, int]:
        """Return the global ranks of both ends, given the mesh of either."""
        line = mesh.ranks((self.axis,))
        return line[self.low], line[self.high]


def matchings(links: Iterable[Link]) -> list[list[Link]]:
    """Return all links in rounds (greedy matchings): no rank is in two links of one round."""
    rounds: list[list[Link]] = []
    for link in sorted(set(links)):
        free = (r for r in rounds if not any({*link.ends} & {*other.ends} for other in r))
        if (found := next(free, None)) is None:
            rounds.append(found := [])
        found.append(link)
    return rounds
