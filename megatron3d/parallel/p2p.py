"""Links between two ranks, over which pipelines send, and the rounds in which all of them can be made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron3d.parallel.mesh import Mesh


@dataclass(frozen=True, order=True)
class Link:
    """Two ranks that differ along one axis only: where they stand on it, the smaller first."""

    axis: str
    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low < self.high, f"a link joins two ranks, not {self}"

    @property
    def ends(self) -> tuple[int, int]:
        """Positions of both ends."""
        return self.low, self.high

    def ranks(self, mesh: Mesh) -> tuple[int, int]:
        """Ranks of both ends, seen from one of them."""
        line = mesh.ranks((self.axis,))
        return line[self.low], line[self.high]


def matchings(links: Iterable[Link]) -> list[list[Link]]:
    """All links in as few rounds as come up easily, no rank being in two links of a round."""
    rounds: list[list[Link]] = []
    for link in sorted(set(links)):
        free = (r for r in rounds if not any({*link.ends} & {*other.ends} for other in r))
        if (found := next(free, None)) is None:
            rounds.append(found := [])
        found.append(link)
    return rounds
