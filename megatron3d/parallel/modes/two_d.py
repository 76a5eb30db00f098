"""2-D tensor parallelism on an r*c grid: SUMMA (van de Geijn and Watts 1997) as Optimus uses it (Xu et al. 2021,
arXiv:2104.05343).

    Y[M/r, N/c]  =  X[M/r, K] W[K, N/c]        X is gathered along K over c, W along K over r
    Y[M/r, N]    =  sum over c of X[M/r, K/c] W[K/c, N]     weight-stationary contract: Y is scattered over c instead

Residual and inner stream are both [r, c].
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode


def summa(shape: tuple[int, ...]) -> Mode:
    """Both matmuls gather X and W."""
    up = MatmulPlan(m=("r",), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2d", (("r", shape[0]), ("c", shape[1])), expand=up, contract=up)


def weight_stationary(shape: tuple[int, ...]) -> Mode:
    """The contracting matmul scatters its output instead of gathering its (larger) input."""
    up = MatmulPlan(m=("r",), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2d", (("r", shape[0]), ("c", shape[1])), expand=up, contract=up.swapped())
