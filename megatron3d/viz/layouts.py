"""Who holds which block of X, W and Y in a tensor-parallel mode, and what one rank gathers, multiplies and sends on.

Blocks, regions and numbers are those of the mode's own plans: `layout.box`, `plan.flows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron3d.parallel.layout import Box, Layout, box, span
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, flows, moves
from megatron3d.parallel.mesh import Axes, Mesh, ranges
from megatron3d.parallel.modes.mode import Mode
from megatron3d.viz.svg import EMPTY, GREY, INK, PAPER, Canvas, Rect

# Pixels along each dimension of the residual and the inner stream, and between the pictures' parts.
RESIDUAL, INNER, TOKENS = 112, 168, 168
COLUMN, LEFT, TOP, ROW = 250, 24, 66, 292
INPUT, GATHERED, OUTPUT, PARTIAL = "#1f5fa8", "#cfe2f6", "#c2600a", "#fbdfc0"


@dataclass(frozen=True)
class Operand:
    """One matrix of a product: its dimensions by name, top to bottom and left to right, and how it is cut.

    Attributes:
        stored: axes that split each dimension where it is stored.
        used: axes that split each dimension while multiplying.
        forward, backward: what moves, in words.
        sent: by each rank, forward and backward, as a part of the whole matrix.
    """

    name: str
    dims: tuple[str, str]
    stored: Layout
    used: Layout
    forward: str
    backward: str
    sent: Fraction


def operands(plan: MatmulPlan, mesh: Mesh) -> tuple[Operand, Operand, Operand]:
    """X, W and Y of a plan."""
    plan, sent = plan.on(mesh), flows(plan, mesh, 1, 1, 1, 1)
    parts = _parts(sent)
    (n, k), dx = plan.w_layout, plan.dx_moves
    again = {"X": _told("gather", plan.x), "W": _told("gather", plan.w)}
    sums = [f"{'scatter' if dim else 'all-reduce'} {_along(axes)}" for axes, dim in dx]
    x = Operand("X", ("M", "K"), plan.x_layout, (plan.m, plan.k), again["X"], _joined(again["X"], *sums), parts["X"])
    scattered = _told("scatter", plan.w)
    w = Operand("W", ("K", "N"), (k, n), (plan.k, plan.n), again["W"], _joined(again["W"], scattered), parts["W"])
    reduced = _joined(*(f"{'scatter' if dim else 'all-reduce'} {_along(axes)}" for axes, dim in moves(plan.y)))
    y = Operand("Y", ("M", "N"), plan.y_layout, (plan.m, plan.n), reduced, _told("gather", plan.dy), parts["Y"])
    return x, w, y


def _parts(sent: Flows) -> Mapping[str, Fraction]:
    """What a rank sends of each matrix and its gradient, where the matrix is one element."""
    calls = {
        "X": (*sent.gather_x, *sent.gather_x, *sent.reduce_dx),
        "W": (*sent.gather_w, *sent.gather_w, *sent.reduce_dw),
        "Y": (*sent.reduce_y, *sent.gather_dy),
    }
    whole = {name: math.fsum(call.wire_bytes for call in each) for name, each in calls.items()}
    return {name: Fraction(value).limit_denominator(10**6) for name, value in whole.items()}


def _along(axes: Axes) -> str:
    return f"over {'·'.join(axes)}"


def _told(verb: str, table: Mapping[str, str]) -> str:
    return _joined(*(f"{verb} {_along(axes)}" for axes, _ in moves(table)))


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def holders(shape: tuple[int, int], stored: Layout, mesh: Mesh) -> dict[Box, list[int]]:
    """Ranks by the block that they hold."""
    found: dict[Box, list[int]] = {}
    for rank in range(mesh.world_size):
        found.setdefault(box(shape, stored, mesh.at(rank)), []).append(rank)
    return found


def layout_picture(mode: Mode, form: str, rank: int) -> str:
    """A mode's two products, seen from one rank, as an SVG file."""
    mesh = Mesh(mode.axes, rank)
    shape = " · ".join(f"{name} {size}" for name, size in mode.axes)
    title = f"{mode.name} {form.replace('_', ' ')} on {mesh.world_size} ranks: {shape}"
    canvas = Canvas(3 * COLUMN + LEFT, TOP + 2 * ROW + 34, title)
    canvas.text((LEFT, 28), title, 17, INK, "bold")
    where = ", ".join(f"{name} {mesh.coord(name)}" for name in mesh.names)
    canvas.text((LEFT, 48), f"Numbers are ranks; in colour what rank {rank} ({where}) holds, gathers, sums", 12, GREY)
    _product(canvas, TOP, "expand: residual to inner stream", mode.expand, mesh)
    _product(canvas, TOP + ROW, "contract: inner to residual stream", mode.contract, mesh)
    canvas.legend(
        (LEFT, TOP + 2 * ROW + 16),
        (
            (INPUT, INPUT, f"held by rank {rank}"),
            (GATHERED, INPUT, "gathered for the product"),
            (OUTPUT, OUTPUT, "kept of Y"),
            (PARTIAL, OUTPUT, "partial sums, given away"),
        ),
    )
    return canvas.document()


def _product(canvas: Canvas, top: float, name: str, plan: MatmulPlan, mesh: Mesh) -> None:
    """A line of X · W = Y."""
    used = mesh.nontrivial((*plan.m, *plan.k, *plan.n))
    canvas.text((LEFT, top + 14), name, 14, INK, "bold")
    share = Fraction(1, mesh.size(used))
    canvas.text((3 * COLUMN, top + 14), f"each rank multiplies {share} of M·N·K", 12, GREY, "end")
    inner, outer = (INNER, RESIDUAL) if top == TOP else (RESIDUAL, INNER)
    sizes = {"M": TOKENS, "K": outer, "N": inner}
    for column, (operand, sign) in enumerate(zip(operands(plan, mesh), ("×", "=", ""), strict=True)):
        rows, columns = (sizes[dim] for dim in operand.dims)
        at = Rect(LEFT + column * COLUMN, top + 26, columns, rows)
        _matrix(canvas, at, operand, mesh)
        canvas.text((LEFT + (column + 1) * COLUMN - 34, top + 26 + TOKENS / 2), sign, 24, GREY, "middle")
        for line, words in enumerate(_captions(operand, mesh)):
            canvas.text((at.x, top + 26 + TOKENS + 18 + 16 * line), words, 12, INK if line == 0 else GREY)


def _captions(operand: Operand, mesh: Mesh) -> Iterator[str]:
    """What is stored, and what moves."""
    first, second = operand.dims
    share = Fraction(1, mesh.size(sum(operand.stored, ())))
    yield f"{operand.name} [{first}, {second}]: {_of(share, 'all of it')} on each rank"
    if not operand.sent:
        yield "nothing moves"
        return
    yield f"forward: {operand.forward or 'nothing'}"
    yield f"backward: {operand.backward or 'nothing'}"
    yield f"sent by each rank: {operand.sent} of {first}·{second}"


def _of(share: Fraction, whole: str) -> str:
    return whole if share == 1 else str(share)


def _matrix(canvas: Canvas, at: Rect, operand: Operand, mesh: Mesh) -> None:
    """Every block with the ranks that hold it; the rank's own, and the region that it multiplies."""
    shape = (math.lcm(mesh.world_size, int(at.height)), math.lcm(mesh.world_size, int(at.width)))
    colour, pale = (OUTPUT, PARTIAL) if operand.name == "Y" else (INPUT, GATHERED)
    spans = tuple(span(size, axes, mesh) for size, axes in zip(shape, operand.used, strict=True))
    region = _place(at, shape, spans)
    for block, ranks in holders(shape, operand.stored, mesh).items():
        is_mine = mesh.rank in ranks
        is_inside = all(low >= a and high <= b for (low, high), (a, b) in zip(block, spans, strict=True))
        fill = colour if is_mine else pale if is_inside else EMPTY
        place = _place(at, shape, block)
        canvas.rect(place, fill, PAPER, 1.5)
        x, y = place.middle
        canvas.text((x, y + 4), _named(ranks), 11, PAPER if is_mine else INK if is_inside else GREY, "middle")
    canvas.rect(region, "none", colour, 2.5)


def _named(ranks: Sequence[int]) -> str:
    """`3`, `0 4`, `0-7`."""
    return ranges(ranks).replace(", ", " ")


def _place(at: Rect, shape: tuple[int, int], block: Box) -> Rect:
    (top, bottom), (left, right) = block
    down, across = at.height / shape[0], at.width / shape[1]
    return Rect(at.x + left * across, at.y + top * down, (right - left) * across, (bottom - top) * down)
