"""2-D tensor parallelism on an r*c grid: SUMMA (van de Geijn and Watts 1997) as Optimus uses it (Xu et al. 2021,
arXiv:2104.05343).

    Y[M/r, N/c]  =  X[M/r, K] W[K, N/c]        X is all-gathered along K over c, W along K over r
    Y[M/r, N]    =  sum over c of X[M/r, K/c] W[K/c, N]     weight-stationary contract: Y is reduce-scattered over c

Residual and inner stream have the layout [r, c].
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode


def summa(shape: tuple[int, ...]) -> Mode:
    """SUMMA in all linears: all-gather X and W."""
    up = MatmulPlan(m=("r",), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2d", (("r", shape[0]), ("c", shape[1])), expand=up, contract=up)


def weight_stationary(shape: tuple[int, ...]) -> Mode:
    """Reduce-scatter the output of contracting linears instead of all-gathering their larger input."""
    up = MatmulPlan(m=("r",), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2d", (("r", shape[0]), ("c", shape[1])), expand=up, contract=up.swapped())
