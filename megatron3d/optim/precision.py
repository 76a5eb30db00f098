"""Precisions of training: dtype of the model, and dtype of main_grad, master weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of a precision.

    Attributes:
        model: dtype of weights and activations.
        main: dtype of main_grad, of the master weights and of the optimizer's arithmetic.
        scales_loss: whether the exponent range of `model` requires loss scaling.
    """

    model: torch.dtype
    main: torch.dtype
    scales_loss: bool = False


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, scales_loss=True),
    "fp64": Precision(torch.float64, torch.float64),
}
