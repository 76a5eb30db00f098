"""3-D tensor parallelism on an x*y*z grid of ranks (Bian et al. 2021, arXiv:2105.14450).

    Y[M/x, N/y]  =  sum over z of  X[M/x, K/z] W[K/z, N/y]

X is stored sharded over y as well (tokens), W over x (its K rows), Y over z: over heads, or over tokens as in the
paper.  Nothing is replicated.  The next matmul exchanges y and z.
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode


def _axes(shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    return ("x", shape[0]), ("y", shape[1]), ("z", shape[2])


def heads(shape: tuple[int, ...]) -> Mode:
    """Shard residual tokens over x*y and inner features over y*z: a microbatch needs a multiple of x sequences."""
    up = MatmulPlan(m=("x",), k=("z",), n=("y",), x={"y": "M"}, w={"x": "K"}, y={"z": "N"})
    return Mode("3d", _axes(shape), expand=up, contract=up.swapped())


def tokens(shape: tuple[int, ...]) -> Mode:
    """The paper's form: shard inner tokens over x*z, inner features over y: a microbatch needs x*z sequences."""
    up = MatmulPlan(m=("x",), k=("z",), n=("y",), x={"y": "M"}, w={"x": "K"}, y={"z": "M"})
    return Mode("3d", _axes(shape), expand=up, contract=up.swapped())
