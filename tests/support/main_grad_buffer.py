"""`MainGrad` of one parameter, for tests of the routes by which gradients reach it."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffer:
    """main_grad of one parameter, initialized with NaN that must be overwritten, and the dtype to reduce it in."""

    def __init__(self, w: Tensor, reduce_dtype: torch.dtype | None = None) -> None:
        self.sum = torch.full(w.shape, torch.nan, dtype=torch.promote_types(w.dtype, torch.float32), device=w.device)
        self.num_opened = self.num_closed = 0
        self.reduce_dtype = reduce_dtype or self.sum.dtype

    def open(self) -> tuple[Tensor, bool]:
        self.num_opened += 1
        return self.sum, self.num_opened > 1

    def close(self) -> None:
        self.num_closed += 1
