"""Learning rate of each step, and the optimizer on flat buffers: its rule, gradient clipping and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron3d.config.run_spec import LRPhases
from megatron3d.config.schema import OptimizerConfig
from megatron3d.errors import UserError
from megatron3d.model.params import part_views
from megatron3d.optim.adamw import ChooseUpdate, ParamGroup, choose_update
from megatron3d.optim.precision import PRECISIONS, LossScale
from megatron3d.optim.rule_spec import rule_of
from megatron3d.zero import Buffers, FlatBuffer

# By the name of the rule.
UPDATES: Mapping[str, ChooseUpdate] = {"adam": choose_update}
# Takes a tensor of a flat buffer's shard and returns the views of it that a group updates.
Views = Callable[[Tensor], Iterable[Tensor]]


class Optimizer:
    """The configured rule on every flat buffer.

    Attributes:
        state: tensors of each kind of state by its name, one per flat buffer in their order, in the shape of `main`.
        num_steps: number of updates so far, skipped ones not counted.
    """

    def __init__(self, buffers: Buffers, config: OptimizerConfig, loss_scale: LossScale | None = None) -> None:
        self.buffers, self.config = buffers, config
        self.loss_scale, self.rule = loss_scale, rule_of(config)
        mains = [flat.main for flat in buffers.flat_buffers]
        self.state: dict[str, list[Tensor]] = {}
        for each in self.rule.states:
            dtype = PRECISIONS[name] if (name := each.dtype(config)) else None
            self.state[each.name] = [torch.zeros_like(main, dtype=dtype) for main in mains]
        self._update = UPDATES[self.rule.name](config, mains, [t for ts in self.state.values() for t in ts])
        self._views = [list(self._group_views(flat)) for flat in buffers.flat_buffers]
        self.num_steps = torch.zeros((), device=next((main.device for main in mains), None))

    @property
    def num_bytes(self) -> int:
        """Bytes of the state on this rank."""
        return sum(tensor.nbytes for tensors in self.state.values() for tensor in tensors)

    def set_num_steps(self, num_steps: float) -> None:
        """Continue to count the updates, as bias corrections need, at `num_steps`."""
        self.num_steps.fill_(num_steps)

    def step(self, grad_norm: Tensor, lr: float) -> Tensor:
        """Clip by the global norm and update; return 1.0 where a non-finite gradient skipped the update, else 0.0.

        Args:
            grad_norm: scalar, global norm of the unscaled gradients; those in the buffers are still scaled.
        """
        factor = self._grad_factor(grad_norm)
        skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
        self.num_steps = self.num_steps.to(skipped.device)
        for group in self._param_groups(factor if self.rule.scales_grads else None):
            if factor is not None and not self.rule.scales_grads:
                for grad in group.grads:
                    grad.mul_(factor)
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

    def _param_groups(self, factor: Tensor | None) -> list[ParamGroup]:
        decay, num_states = self.config.weight_decay, len(self.state)
        groups = [
            ParamGroup(decay if each.decays else 0.0, states=tuple([] for _ in range(num_states)), factor=factor)
            for each in self.rule.groups
        ]
        for flat, views, *states in zip(self.buffers.flat_buffers, self._views, *self.state.values(), strict=True):
            for index, views_of in views:
                for tensors, tensor in zip(groups[index].lists, (flat.grad, flat.main, *states), strict=True):
                    tensors += views_of(tensor)
        return groups

    def _group_views(self, flat: FlatBuffer) -> Iterator[tuple[int, Views]]:
        """Yield the views of a flat buffer's shard that the rule updates, each with the index of its group."""

        def group_of(path: str) -> int:
            spec = self.buffers.specs[path]
            return next(index for index, group in enumerate(self.rule.groups) if group.matches(path, spec))

        if self.rule.is_elementwise:
            yield from ((index, lambda tensor, where=where: [tensor[where]]) for index, where in flat.runs(group_of))
        else:
            yield from ((group_of(path), self._logical_tensors(flat, path)) for path in flat.spans)

    def _logical_tensors(self, flat: FlatBuffer, path: str) -> Views:
        """Return the function that views the logical tensors of a parameter; raises UserError if they are sharded."""
        spec, mesh = self.buffers.specs[path], self.buffers.comm.mesh
        if axes := mesh.nontrivial((*flat.sharding.axes, *mesh.in_order(spec.axes))):
            raise UserError(
                f"optimizer.optimizer={self.rule.name}: it updates whole tensors, but {path} is sharded over "
                f"{', '.join(axes)}; use one rank along these axes, parallel.zero_stage=0, or another optimizer"
            )
        where = flat.shard_range(path)[1]
        return lambda tensor: [view for _, _, view in part_views(spec, tensor[where], mesh)]


def learning_rate(config: OptimizerConfig, phases: LRPhases, position: int) -> float:
    """Return the learning rate at a position of the schedule (from 1): linear warm-up, decay, then `min_lr`."""
    if position <= phases.warmup:
        return config.lr * position / phases.warmup
    if position > phases.end and config.lr_decay_style != "constant":
        return config.min_lr
    progress = (position - phases.warmup) / max(phases.end - phases.warmup, 1)
    return _DECAY[config.lr_decay_style](config, phases, progress, position)


def _warmup_stable_decay(config: OptimizerConfig, phases: LRPhases, progress: float, position: int) -> float:
    """Return the constant rate, or in the last phase its decay to min_lr (Hu et al. 2024, arXiv:2404.06395)."""
    remaining = min((phases.end - position) / phases.wsd_decay, 1.0)
    return config.min_lr + (config.lr - config.min_lr) * _WSD_DECAY[config.lr_wsd_decay_style](remaining)


# Fraction of lr - min_lr by the remaining fraction of the decay phase, as in Megatron-LM; minus_sqrt is by Hägele et
# al. 2024, arXiv:2405.18392.
_WSD_DECAY: Mapping[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "exponential": lambda left: 2 * 0.5 ** (1 - left) - 1,
    "minus_sqrt": lambda left: 1 - math.sqrt(1 - left),
}
_DECAY: Mapping[str, Callable[[OptimizerConfig, LRPhases, float, int], float]] = {
    "constant": lambda c, phases, progress, i: c.lr,
    "linear": lambda c, phases, progress, i: c.lr - (c.lr - c.min_lr) * progress,
    "cosine": lambda c, phases, progress, i: c.min_lr + (c.lr - c.min_lr) * (1 + math.cos(math.pi * progress)) / 2,
    "inverse-square-root": lambda c, phases, progress, i: max(c.lr * math.sqrt(max(phases.warmup, 1) / i), c.min_lr),
    "WSD": _warmup_stable_decay,
}
