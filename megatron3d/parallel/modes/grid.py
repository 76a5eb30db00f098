"""A general x*y*z grid: AxoNN's 3-D matmul (Singh et al. 2024, arXiv:2305.13525 and 2502.08145).

    Y[M/z, N/y]  =  sum over x of  X[M/z, K/x] W[K/x, N/y]

Tokens are sharded over z, and so is W where it is stored.  Y is all-reduced over x, so that the residual stream [z, x]
is replicated over y and the inner stream [z, y] over x; or it is reduce-scattered, and nothing is replicated.
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode


def _axes(shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    return ("x", shape[0]), ("y", shape[1]), ("z", shape[2])


def all_reduce(shape: tuple[int, ...]) -> Mode:
    """AxoNN's form: all-reduce Y."""
    up = MatmulPlan(m=("z",), k=("x",), n=("y",), w={"z": "K"}, y={"x": None})
    return Mode("grid", _axes(shape), expand=up, contract=up.swapped())


def scatter(shape: tuple[int, ...]) -> Mode:
    """Reduce-scatter Y over its features, and all-gather it as the next X."""
    up = MatmulPlan(m=("z",), k=("x",), n=("y",), x={"y": "K"}, w={"z": "K"}, y={"x": "N"})
    return Mode("grid", _axes(shape), expand=up, contract=up.swapped())
