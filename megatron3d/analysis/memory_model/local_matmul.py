"""Local sizes of one matmul on one rank."""

from __future__ import annotations

from typing import NamedTuple

from megatron3d.parallel.matmul_plan import MatmulPlan


class LocalMatmul(NamedTuple):
    """Matmul of one linear: plan, global sizes m, n, k, and the elements of X, W and Y that this rank stores.

    `whole_w` are the elements of W after its all-gather.
    """

    plan: MatmulPlan
    m: int
    n: int
    k: int
    x: int
    w: int
    y: int
    whole_w: int
