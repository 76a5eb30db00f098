"""The matmul of a linear that no axis shards: three GEMMs, and as little Python between them as possible.

    forward     Y = X W^T + b
    backward    dX = dY W,    main_grad of W += dY^T X,    main_grad of b += sum of dY over tokens

Kernels and numbers are those of `ops.matmul`.  Its objects for plans, collectives and hooks cost several times as much
as a small GEMM.  Letters: M tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.ops.gemm import product, product_of_rows
from megatron3d.ops.main_grad import MainGrads

Operands = tuple[Tensor, Tensor | None, MainGrads]


def plain_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, main_grads: MainGrads) -> Tensor:
    """Return Y[M, N] = X W^T + bias, where X requires a gradient and both parameters have a main_grad.

    Autograd sees X alone: the parameters travel in a tuple, so that it neither visits nor calls hooks of them.
    """
    y_MN: Tensor = _PlainMatmul.apply(x_MK, (w_NK, bias_N, main_grads))
    return y_MN


class _PlainMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, operands: Operands) -> Tensor:
        ctx.operands = operands
        w_NK, bias_N, _ = operands
        ctx.save_for_backward(x_MK, w_NK)
        return product(x_MK, w_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, None]:
        param, bias_N, main_grads = ctx.operands
        x_MK, w_NK = ctx.saved_tensors
        dx_MK = product_of_rows(dy_MN, w_NK)
        main_grads.accumulate(param, dy_MN.T, x_MK.T)
        if bias_N is not None:
            main_grads.add(bias_N, dy_MN.sum(0))
        return dx_MK, None
