"""Which collectives of a planned matmul overlap with which GEMMs, which run in rounds, and which stay exposed.

With `parallel.tp_comm_overlap` some collectives run in rounds with their own GEMM, and need no other one to overlap:

    forward     Y = X W       X is gathered along its rows: each rank's rows are multiplied on arrival
                              Y is reduce-scattered, along either dim: each rank's part is sent when it is computed
    backward    dX = dY W     the same of dY and dX

A gather along the summed dim does not fit: its partial sums would be rounded in every round.  Where one matmul has
both, the gather runs in rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Move, Traffic, moves
from megatron3d.parallel.mesh import Axes


class Direction(Enum):
    """Direction of a pass through the linears."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class TPOverlap:
    """Overlap of tensor-parallel communication with GEMMs; no switch changes a result.

    Attributes:
        input_grad: overlap the reduction of dX with the wgrad GEMM.
        weight_grad: overlap the reduction of dW with the backward of the preceding layers.
        weight_gather: prefetch W, in forward and in backward, during the GEMMs of the linear before it.
        keep_gathered_weights: keep the W gathered in forward until backward, which saves one all-gather.
        in_rounds: run exposed all-gathers and reduce-scatters in rounds with their own GEMM (`in_rounds`).
    """

    input_grad: bool = True
    weight_grad: bool = True
    weight_gather: bool = True
    keep_gathered_weights: bool = False
    in_rounds: bool = False


OVERLAP_ALL = TPOverlap()


# Names of the collectives that run in rounds; their bytes are those of the plain ones.
ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER = IN_ROUNDS = ("all_gather_matmul", "matmul_reduce_scatter")


class AsyncPlan(NamedTuple):
    """The collective next to the GEMM of each operand that runs in rounds with it; None: the ordinary one.

    Attributes:
        dx: the reduce-scatter of dX, which runs in rounds only where no wgrad GEMM follows that it can overlap with.
    """

    x: Move | None
    y: Move | None
    dy: Move | None
    dx: Move | None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing runs in rounds where the wgrad follows the dgrad."""
        return not (self.x or self.y or self.dy)


NO_ROUNDS = AsyncPlan(None, None, None, None)


def async_plan(plan: MatmulPlan) -> AsyncPlan:
    """Return what runs in rounds of a plan without axes of size 1."""
    x, dy = _rows(moves(plan.x)), _rows(moves(plan.dy))
    return AsyncPlan(x, None if x else _scatter(moves(plan.y)), dy, None if dy else _scatter(plan.dx_moves))


def overlapped(plan: MatmulPlan, overlap: TPOverlap) -> list[Move]:
    """Return the collectives of a plan without axes of size 1 that run during a GEMM in forward or backward.

    X is gathered for the wgrad during the dgrad GEMM.
    """
    rounds = async_plan(plan) if overlap.in_rounds else NO_ROUNDS
    found = [*moves(plan.x), *(move for move in rounds if move)]
    found += plan.dx_moves if overlap.input_grad else ()
    found += moves(plan.w) if overlap.weight_grad or overlap.weight_gather else ()
    return found


def _rows(gathers: tuple[Move, ...]) -> Move | None:
    """Return the gather that ends right before the GEMM, where it is along the rows."""
    return gathers[0] if gathers and gathers[0].dim == "M" else None


def _scatter(reductions: tuple[Move, ...]) -> Move | None:
    """Return the reduction that begins right after the GEMM, where it is a reduce-scatter."""
    return reductions[0] if reductions and reductions[0].dim else None


def in_rounds(sent: Flows, plan: MatmulPlan) -> Flows:
    """Return the collectives of a matmul with those in rounds under their names.

    X is gathered in rounds in forward only, and dX reduced in rounds only where no wgrad GEMM follows.
    """
    found = async_plan(plan)
    return sent._replace(
        gather_x=_last_renamed(sent.gather_x, found.x),
        gather_dy=_last_renamed(sent.gather_dy, found.dy),
        reduce_y=_first_renamed(sent.reduce_y, found.y),
        reduce_dx=_first_renamed(sent.reduce_dx, found.dx),
    )


def _last_renamed(calls: list[Traffic], move: Move | None) -> list[Traffic]:
    return [*calls[:-1], calls[-1]._replace(collective=ALL_GATHER_MATMUL)] if move else calls


def _first_renamed(calls: list[Traffic], move: Move | None) -> list[Traffic]:
    return [calls[0]._replace(collective=MATMUL_REDUCE_SCATTER), *calls[1:]] if move else calls


_PREFIX, _SEPARATOR = "along ", "·"


class ExposedComm(str):
    """Exposed communication over `axes`, as a key in tables of times; `along x·y` in metrics.jsonl and on the console.

    It is a str, so that such tables have text keys; ask `isinstance` and `axes` instead of reading the text.
    """

    axes: Axes

    def __new__(cls, axes: Axes) -> ExposedComm:
        """Return the name for these axes."""
        name = super().__new__(cls, _PREFIX + _SEPARATOR.join(axes))
        name.axes = axes
        return name

    def __reduce__(self) -> tuple[type[ExposedComm], tuple[Axes]]:
        return ExposedComm, (self.axes,)

    @staticmethod
    def from_log(name: str) -> str:
        """Return a key of metrics.jsonl as ExposedComm if it names axes, else unchanged."""
        return ExposedComm(tuple(name.removeprefix(_PREFIX).split(_SEPARATOR))) if name.startswith(_PREFIX) else name
