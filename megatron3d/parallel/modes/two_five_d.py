"""2.5-D tensor parallelism on a d*r*c grid: Tesseract (Wang et al. 2021, arXiv:2105.14500).

    Y[M/dr, N/c]  =  X[M/dr, K] W[K, N/c]      2-D SUMMA on every depth layer

Tokens are sharded over the depth d; weights are replicated over it, and their gradients all-reduced.
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode


def _axes(shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    return ("d", shape[0]), ("r", shape[1]), ("c", shape[2])


def summa(shape: tuple[int, ...]) -> Mode:
    """SUMMA in all linears: all-gather X and W."""
    up = MatmulPlan(m=("d", "r"), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2.5d", _axes(shape), expand=up, contract=up)


def weight_stationary(shape: tuple[int, ...]) -> Mode:
    """Reduce-scatter the output of contracting linears instead of all-gathering their larger input."""
    up = MatmulPlan(m=("d", "r"), n=("c",), x={"c": "K"}, w={"r": "K"})
    return Mode("2.5d", _axes(shape), expand=up, contract=up.swapped())
