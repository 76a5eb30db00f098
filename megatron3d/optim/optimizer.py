"""AdamW on flat buffers, with gradient clipping and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron3d.config.schema import OptimizerConfig
from megatron3d.hardware.apex import adam_kernel
from megatron3d.optim.adamw import (
    ParamGroup,
    Update,
    update_chunked,
    update_fused,
    update_with_apex,
    update_with_triton,
)
from megatron3d.optim.precision import LossScale
from megatron3d.runtime.machine import has_triton
from megatron3d.zero import Buffers, FlatBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_DTYPES: Mapping[str | None, torch.dtype | None] = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer:
    """AdamW on every flat buffer; norms and biases have no weight decay.

    Attributes:
        num_steps: number of updates so far, skipped ones not counted.
    """

    def __init__(self, buffers: Buffers, config: OptimizerConfig, loss_scale: LossScale | None = None) -> None:
        self.buffers, self.config = buffers, config
        self.loss_scale = loss_scale
        self._update = choose_update(config, buffers.flat_buffers)
        dtypes = [MOMENT_DTYPES[name] for name in (config.exp_avg_dtype, config.exp_avg_sq_dtype)]
        self._moments = [
            [torch.zeros_like(flat.main, dtype=dtype or flat.main.dtype) for dtype in dtypes]
            for flat in buffers.flat_buffers
        ]
        self.num_steps = torch.zeros((), device=next((flat.main.device for flat in buffers.flat_buffers), None))

    def moment(self, flat: FlatBuffer, which: str) -> Tensor:
        """Return the first or second moment (`which`, one of `MOMENTS`) of a flat buffer."""
        index = next(index for index, mine in enumerate(self.buffers.flat_buffers) if mine is flat)
        return self._moments[index][MOMENTS.index(which)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the first and second moments on this rank."""
        return sum(moment.nbytes for moments in self._moments for moment in moments)

    def set_num_steps(self, num_steps: float) -> None:
        """Continue AdamW's bias correction at `num_steps`."""
        self.num_steps.fill_(num_steps)

    def step(self, grad_norm: Tensor, lr: float) -> Tensor:
        """Clip by the global norm and update; return 1.0 where a non-finite gradient skipped the update, else 0.0.

        Args:
            grad_norm: scalar, global norm of the unscaled gradients; those in the buffers are still scaled.
        """
        factor = self._grad_factor(grad_norm)
        if factor is not None:
            for flat in self.buffers.flat_buffers:
                flat.grad.mul_(factor)
        skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
        self.num_steps = self.num_steps.to(skipped.device)
        for group in self._param_groups():
            self._update(group, self.config, lr, self.num_steps, skipped)
        self.num_steps += 1 - skipped
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        self.buffers.publish()
        return skipped

    def _grad_factor(self, grad_norm: Tensor) -> Tensor | None:
        """Return the factor that clips and unscales the gradients; None where it is 1."""
        clip_grad = self.config.clip_grad
        clipping = (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if clip_grad > 0 else None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        if not isinstance(scale, Tensor):
            return clipping
        return scale.reciprocal() if clipping is None else clipping / scale

    def _param_groups(self) -> tuple[ParamGroup, ParamGroup]:
        """Return the group with weight decay and the group without."""
        groups = ParamGroup(self.config.weight_decay), ParamGroup(0.0)
        for flat, moments in zip(self.buffers.flat_buffers, self._moments, strict=True):
            for group, where in zip(groups, flat.decay_slices, strict=True):
                if where.start < where.stop:
                    for tensors, tensor in zip(group.lists, (flat.grad, flat.main, *moments), strict=True):
                        tensors.append(tensor[where])
        return groups


def choose_update(config: OptimizerConfig, flats: Sequence[FlatBuffer]) -> Update:
    """Return the configured fused kernel, or the chunked update where moments and weights differ in dtype.

    Raises UserError where apex is configured, but NVIDIA's is not installed or does not support the device.
    """
    main = {flat.main.dtype for flat in flats}
    moments = {MOMENT_DTYPES[name] for name in (config.exp_avg_dtype, config.exp_avg_sq_dtype)} - {None}
    if moments - main:
        on_gpus = all(flat.main.is_cuda for flat in flats)
        return update_with_triton if on_gpus and main == {torch.float32} and has_triton() else update_chunked
    if config.adam_implementation == "apex":
        return update_with_apex(adam_kernel({flat.main.device for flat in flats}))
    return update_fused
