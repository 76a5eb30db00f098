"""Picture of context parallelism: who holds which positions, and which keys each rank's queries see.

A row is a query, a column a key, a colour the context rank that multiplies the two; keys that come from another rank
are pale.  Chunks, pairs of rows and steps are those of `attention/context/plan.py` and `attention/plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron3d.attention.context.plan import Chunks, RingPlan, ring_plan, zigzag
from megatron3d.attention.plan import Kind, Pair
from megatron3d.viz.svg import EMPTY, GREY, INK, PAPER, Canvas, Rect

RANKS, POSITIONS = 4, 32
# Pixels: of a position, of the strip of ranks, and of a panel.
CELL, STRIP = 7, 20
PANEL, LEFT, TOP = 306, 24, 108
# Colours of each rank: its own keys, keys of other ranks.
COLOURS = (("#1f5fa8", "#a9c8ea"), ("#c2600a", "#f3c9a0"), ("#3f8f5f", "#b5dcc3"), ("#7a4fa3", "#d3c0e6"))


class AttentionPanel(NamedTuple):
    """One picture of attention: documents and window."""

    title: str
    starts: tuple[int, ...] = ()
    window: int | None = None

    def plans(self) -> tuple[RingPlan, ...]:
        """Return the plan of each rank of a ring."""
        starts = (self.starts,) if self.starts else None
        return tuple(ring_plan(HELD, rank, starts, self.window) for rank in range(RANKS))


HELD: Chunks = tuple(zigzag(POSITIONS, RANKS, rank) for rank in range(RANKS))
PANELS = (
    AttentionPanel("causal"),
    AttentionPanel("documents from 6, 13 and 27", (6, 13, 27)),
    AttentionPanel("window of 5", window=5),
)


def held_positions(rank: int) -> list[int]:
    """Return the positions of a context rank in the order of its rows."""
    return [position for low, high in HELD[rank] for position in range(low, high)]


def seen(pair: Pair, window: int | None) -> Iterator[tuple[int, int]]:
    """Yield the rows of queries and of keys of a pair in which the query sees the key."""
    for i in range(pair.queries[1] - pair.queries[0]):
        for j in range(pair.keys[1] - pair.keys[0]):
            is_near = window is not None and 0 <= pair.distance + i - j < window
            if {Kind.WHOLE: True, Kind.CAUSAL: j <= i, Kind.MASKED: is_near}[pair.kind]:
                yield pair.queries[0] + i, pair.keys[0] + j


def multiplied_pairs(panel: AttentionPanel) -> Mapping[tuple[int, int], tuple[int, int]]:
    """Return, by positions of a query and a key that it sees, the rank that multiplies them and the key's rank."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, plan in enumerate(panel.plans()):
        for behind, some in ((0, plan.own), *((step.behind, step.pairs) for step in plan.steps)):
            holder = (rank - behind) % RANKS
            queries, keys = held_positions(rank), held_positions(holder)
            for pair in some:
                for i, j in seen(pair, panel.window):
                    found[queries[i], keys[j]] = rank, holder
    return found


def positions_picture() -> str:
    """Return the picture as an SVG file."""
    title = f"{RANKS} context ranks hold {POSITIONS} positions: rank r has chunks r and {2 * RANKS - 1} - r"
    below = "A row is a query, a column a key; numbers are the ranks that hold each chunk."
    canvas = Canvas(len(PANELS) * PANEL + LEFT, TOP + STRIP + POSITIONS * CELL + 96, title, below, 28)
    for place, panel in enumerate(PANELS):
        _draw(canvas, LEFT + place * PANEL, panel)
    bottom = TOP + STRIP + POSITIONS * CELL + 80
    names = ((dark, dark, f"rank {rank}") for rank, (dark, _) in enumerate(COLOURS))
    canvas.legend((LEFT, bottom), (*names, (COLOURS[0][1], COLOURS[0][1], "pale: the key comes from another rank")))
    return canvas.document()


def _draw(canvas: Canvas, left: float, panel: AttentionPanel) -> None:
    """Draw one matrix of queries and keys, the holders of both, and the work of each rank."""
    canvas.text((left, TOP - 14), panel.title, 14, INK, "bold")
    x, y = left + STRIP, TOP + STRIP
    for rank, chunks in enumerate(HELD):
        for low, high in chunks:
            size = (high - low) * CELL
            across, down = Rect(x + low * CELL, TOP, size, STRIP - 2), Rect(left, y + low * CELL, STRIP - 2, size)
            for strip in (across, down):
                canvas.rect(strip, COLOURS[rank][0])
                middle = strip.middle
                canvas.text((middle[0], middle[1] + 4), str(rank), 11, PAPER, "middle")
    canvas.rect(Rect(x, y, POSITIONS * CELL, POSITIONS * CELL), EMPTY)
    multiplied = multiplied_pairs(panel)
    for query, first, last, colour in _runs(multiplied):
        canvas.rect(Rect(x + first * CELL, y + query * CELL, (last - first) * CELL, CELL), colour, colour, 0)
    work = [sum(rank == owner for rank, _ in multiplied.values()) for owner in range(RANKS)]
    steps = [str(step.behind) for step in panel.plans()[0].steps]
    bottom = y + POSITIONS * CELL
    canvas.text((left, bottom + 20), f"pairs of each rank: {', '.join(map(str, work))}", 12)
    canvas.text((left, bottom + 38), f"steps of a ring: {', '.join(steps) or 'none'}", 12, GREY)


def _runs(multiplied: Mapping[tuple[int, int], tuple[int, int]]) -> Iterator[tuple[int, int, int, str]]:
    """Yield query, first and last key, and colour of neighbouring cells of one colour."""
    colours = {at: COLOURS[rank][rank != holder] for at, (rank, holder) in multiplied.items()}
    for query, first in sorted(colours):
        colour = colours[query, first]
        if colours.get((query, first - 1)) == colour:
            continue
        last = first
        while colours.get((query, last)) == colour:
            last += 1
        yield query, first, last, colour
