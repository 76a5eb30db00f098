"""One planned matmul by a `Matmul` that is made for the call."""

from __future__ import annotations

from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.linear.main_grad import WgradQueue
from megatron3d.linear.matmul import Matmul
from megatron3d.parallel.matmul_plan import MatmulPlan


def linear(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: MatmulPlan, comm: Comm, wgrads: WgradQueue | None = None
) -> Tensor:
    """Return Y[M, N] = X W^T + bias."""
    return Matmul(plan, comm, wgrads=wgrads)(x_MK, w_NK, bias_N)
