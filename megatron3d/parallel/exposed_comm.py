"""Exposed communication: the collectives of a matmul that no GEMM overlaps with, and the name of the time they take."""

from __future__ import annotations

from typing import NamedTuple

from megatron3d.parallel.async_plan import IN_ROUNDS, in_rounds
from megatron3d.parallel.matmul_plan import Flows, MatmulPlan, Traffic
from megatron3d.parallel.mesh import Axes

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


class ExposedCalls(NamedTuple):
    """Collectives of one matmul that begin and end without a GEMM between."""

    forward: list[Traffic]
    backward: list[Traffic]


def exposed_calls(sent: Flows, plan: MatmulPlan, rounds: bool, splits_backward: bool = False) -> ExposedCalls:
    """Return what remains exposed with all `tp_comm_overlap_*`, and with `tp_comm_overlap` where `rounds`.

    W is prefetched, and dW reduced, during the GEMMs of neighbours.  In backward X is gathered during the dgrad GEMM
    and dX reduced during the wgrad GEMM, unless the schedule splits them.
    """
    named = in_rounds(sent, plan) if rounds else sent
    backward = named.gather_dy + (named.reduce_dx + sent.gather_x if splits_backward else [])
    found = (named.gather_x + named.reduce_y, backward)
    return ExposedCalls(*([call for call in calls if call.collective not in IN_ROUNDS] for calls in found))
