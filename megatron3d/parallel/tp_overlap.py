"""Overlaps of a linear's communication with its computation: the `tp_comm_overlap_*` keys as one plain value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Direction of a pass through the linears."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class TPOverlap:
    """Overlap of tensor-parallel communication with GEMMs; no switch changes a result.

    Attributes:
        num_panels: panels in which operands are gathered and results reduced; 1: each matmul in one piece.
        input_grad: overlap the reduction of dX with the wgrad GEMM.
        weight_grad: overlap the reduction of dW with the backward of the preceding layers.
        weight_gather: prefetch W, in forward and in backward, during the GEMMs of the linear before it.
        keep_gathered_weights: keep the W gathered in forward until backward, which saves one all-gather.
        in_rounds: run exposed all-gathers and reduce-scatters in rounds with their own GEMM (parallel/async_plan.py).
    """

    num_panels: int = 1
    input_grad: bool = True
    weight_grad: bool = True
    weight_gather: bool = True
    keep_gathered_weights: bool = False
    in_rounds: bool = False


OVERLAP_ALL = TPOverlap()
