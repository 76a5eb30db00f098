"""1-D tensor parallelism over t ranks (Shoeybi et al. 2019, arXiv:1909.08053), with or without sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198).

    Y[M, N/t]  =  X[M, K] W[K, N/t]           expand: no communication, or X is all-gathered over its tokens
    Y[M, N]    =  sum over t of X[M, K/t] W[K/t, N]     contract: Y is all-reduced, or reduce-scattered over its tokens
"""

from __future__ import annotations

from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.modes.mode import Mode

ONE_D = "1d"


def replicated(shape: tuple[int, ...]) -> Mode:
    """Replicate the residual stream on every rank."""
    up = MatmulPlan(n=("t",))
    return Mode(ONE_D, (("t", shape[0]),), expand=up, contract=up.swapped())


def sequence_parallel(shape: tuple[int, ...]) -> Mode:
    """Shard the tokens of the residual stream over t."""
    up = MatmulPlan(n=("t",), x={"t": "M"})
    return Mode(ONE_D, (("t", shape[0]),), expand=up, contract=up.swapped())
