"""Picture of a tensor-parallel mode: the ranks that store each block of X, W and Y, and one rank's communication.

Blocks, regions and numbers are those of the mode's own plans: `layout.box`, `plan.flows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from megatron3d.parallel.layout import Box, Layout, box, span
from megatron3d.parallel.matmul_plan import MatmulPlan, Move, flows, moves
from megatron3d.parallel.mesh import Mesh, ranges
from megatron3d.parallel.modes.mode import Mode
from megatron3d.viz.svg import EMPTY, GREY, INK, PAPER, Canvas, Rect

# Pixels: of the residual stream, the inner features and the tokens, and between the parts of the picture.
RESIDUAL, INNER = 112, 168
TOKENS = 168
COLUMN, LEFT = 316, 24
TOP, ROW = 66, 292
INPUT, GATHERED = "#1f5fa8", "#cfe2f6"
OUTPUT, PARTIAL = "#c2600a", "#fbdfc0"


@dataclass(frozen=True)
class DrawnOperand:
    """One matrix of a matmul: its dims by name, top to bottom and left to right, and how it is sharded.

    Attributes:
        stored: axes that split each dim of the stored matrix.
        used: axes that split each dim during the GEMM.
        forward, backward: collectives of the two passes, in words.
        sent: what each rank sends in both passes, as a fraction of the whole matrix.
    """

    name: str
    dims: tuple[str, str]
    stored: Layout
    used: Layout
    forward: str
    backward: tuple[str, ...]
    sent: Fraction


def operands(plan: MatmulPlan, mesh: Mesh) -> tuple[DrawnOperand, DrawnOperand, DrawnOperand]:
    """Return X, W and Y of a plan."""
    plan = plan.on(mesh)
    sent, (n, k) = _sent_fractions(plan, mesh), plan.w_layout
    gather_x, gather_w, gather_dy = (_in_words(moves(table), "all-gather") for table in (plan.x, plan.w, plan.dy))
    dx, dw = (gather_x, _in_words(plan.dx_moves)), (gather_w, _in_words(moves(plan.w)))
    x = DrawnOperand("X", ("M", "K"), plan.x_layout, (plan.m, plan.k), gather_x, dx, sent["X"])
    w = DrawnOperand("W", ("K", "N"), (k, n), (plan.k, plan.n), gather_w, dw, sent["W"])
    reduce_y = _in_words(moves(plan.y))
    y = DrawnOperand("Y", ("M", "N"), plan.y_layout, (plan.m, plan.n), reduce_y, (gather_dy,), sent["Y"])
    return x, w, y


def _sent_fractions(plan: MatmulPlan, mesh: Mesh) -> Mapping[str, Fraction]:
    """Return what a rank sends of each matrix and its gradient, as fractions of the whole matrix."""
    sent = flows(plan, mesh, 1, 1, 1, 1)
    collectives = {
        "X": (*sent.gather_x, *sent.x_again, *sent.reduce_dx),
        "W": (*sent.gather_w, *sent.w_again, *sent.reduce_dw),
        "Y": (*sent.reduce_y, *sent.gather_dy),
    }
    fractions = {name: math.fsum(each.wire_bytes for each in traffics) for name, traffics in collectives.items()}
    return {name: Fraction(value).limit_denominator(10**6) for name, value in fractions.items()}


def _in_words(steps: Iterable[Move], collective: str | None = None) -> str:
    """Return collectives in words; without a name they are reductions, which scatter a dim or are all-reduces."""
    named = ((collective or ("reduce-scatter" if dim else "all-reduce"), axes) for axes, dim in steps)
    return ", ".join(f"{name} over {'·'.join(axes)}" for name, axes in named)


def holders(shape: tuple[int, int], stored: Layout, mesh: Mesh) -> dict[Box, list[int]]:
    """Return the ranks that store each block."""
    found: dict[Box, list[int]] = {}
    for rank in range(mesh.world_size):
        found.setdefault(box(shape, stored, mesh.at(rank)), []).append(rank)
    return found


def layout_picture(mode: Mode, form: str, rank: int) -> str:
    """Return the two matmuls of a mode, seen from one rank, as an SVG file."""
    mesh = Mesh(mode.axes, rank)
    shape = " · ".join(f"{name} {size}" for name, size in mode.axes)
    title = f"{mode.name} {form.replace('_', ' ')} on {mesh.world_size} ranks: {shape}"
    where = ", ".join(f"{name} {mesh.coord(name)}" for name in mesh.names)
    below = f"Numbers: ranks. Coloured: what rank {rank} ({where}) stores, all-gathers, reduces"
    canvas = Canvas(3 * COLUMN + LEFT, TOP + 2 * ROW + 34, title, below, 28)
    _matmul(canvas, TOP, "expand (column-parallel): residual stream to inner features", mode.expand, mesh)
    _matmul(canvas, TOP + ROW, "contract (row-parallel): inner features to residual stream", mode.contract, mesh)
    canvas.legend(
        (LEFT, TOP + 2 * ROW + 16),
        (
            (INPUT, INPUT, f"stored by rank {rank}"),
            (GATHERED, INPUT, "all-gathered for the GEMM"),
            (OUTPUT, OUTPUT, "Y stored"),
            (PARTIAL, OUTPUT, "partial sums, reduced"),
        ),
    )
    return canvas.document()


def _matmul(canvas: Canvas, top: float, name: str, plan: MatmulPlan, mesh: Mesh) -> None:
    used = mesh.nontrivial((*plan.m, *plan.k, *plan.n))
    canvas.text((LEFT, top + 14), name, 14, INK, "bold")
    share = Fraction(1, mesh.size(used))
    canvas.text((3 * COLUMN, top + 14), f"FLOPs of each rank: {share} of the matmul", 12, GREY, "end")
    inner, outer = (INNER, RESIDUAL) if top == TOP else (RESIDUAL, INNER)
    sizes = {"M": TOKENS, "K": outer, "N": inner}
    for column, (operand, sign) in enumerate(zip(operands(plan, mesh), ("×", "=", ""), strict=True)):
        rows, columns = (sizes[dim] for dim in operand.dims)
        at = Rect(LEFT + column * COLUMN, top + 26, columns, rows)
        _matrix(canvas, at, operand, mesh)
        canvas.text((LEFT + (column + 1) * COLUMN - 34, top + 26 + TOKENS / 2), sign, 24, GREY, "middle")
        for line, words in enumerate(_captions(operand, mesh)):
            canvas.text((at.x, top + 26 + TOKENS + 18 + 16 * line), words, 12, INK if line == 0 else GREY)


def _captions(operand: DrawnOperand, mesh: Mesh) -> Iterator[str]:
    first, second = operand.dims
    share = Fraction(1, mesh.size(sum(operand.stored, ())))
    yield f"{operand.name} [{first}, {second}]: {'all of it' if share == 1 else share} on each rank"
    if not operand.sent:
        yield "no communication"
        return
    yield f"forward: {operand.forward or 'none'}"
    yield f"backward: {', '.join(filter(None, operand.backward)) or 'none'}"
    yield f"sent by each rank: {operand.sent} of {first}·{second}"


def _matrix(canvas: Canvas, at: Rect, operand: DrawnOperand, mesh: Mesh) -> None:
    """Draw every block with the ranks that store it, and the region that this rank multiplies."""
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
        canvas.text(
            (x, y + 4), ranges(ranks).replace(", ", " "), 11, PAPER if is_mine else INK if is_inside else GREY, "middle"
        )
    canvas.rect(region, "none", colour, 2.5)


def _place(at: Rect, shape: tuple[int, int], block: Box) -> Rect:
    (top, bottom), (left, right) = block
    down, across = at.height / shape[0], at.width / shape[1]
    return Rect(at.x + left * across, at.y + top * down, (right - left) * across, (bottom - top) * down)
