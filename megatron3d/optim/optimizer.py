"""Learning rate of each step, and the optimizer on flat buffers: its rule, gradient clipping and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron3d.config.run_spec import LRPhases
from megatron3d.config.schema import OptimizerConfig
from megatron3d.optim.adamw import CPU_CHUNK, GPU_CHUNK, ChooseUpdate, ParamGroup, Update, choose_update
from megatron3d.optim.homes import HomeState, MatrixExchange
from megatron3d.optim.lion import choose_lion
from megatron3d.optim.muon import update_with_muon
from megatron3d.optim.precision import PRECISIONS, LossScale
from megatron3d.optim.qk_clip import QKClip
from megatron3d.optim.rule_spec import EMA, GroupSpec, groups_of, rule_of
from megatron3d.optim.soap import update_with_soap
from megatron3d.zero import Buffers, FlatBuffer

NOWHERE = slice(0, 0)
# By the name of the rule: those of every element by itself, and those of whole matrices.
UPDATES: Mapping[str, ChooseUpdate] = {"adam": choose_update, "lion": choose_lion}
MATRIX_UPDATES: Mapping[str, Callable[[MatrixExchange], Update]] = {
    "muon": update_with_muon,
    "soap": update_with_soap,
}


@dataclass(frozen=True)
class StateShard:
    """A kind of state of the parameters in a flat buffer that one rule updates.

    Attributes:
        name: name of the kind.
        first: element of the flat buffer's shard that `values` start at.
    """

    name: str
    flat: FlatBuffer
    first: int
    values: Tensor

    def of(self, where: slice) -> Tensor | None:
        """Return the state of elements of the flat buffer's shard; None where another rule updates them."""
        place = self.place(where)
        return self.values[place] if place.start >= 0 and place.stop <= len(self.values) else None

    def place(self, where: slice) -> slice:
        """Return where `values` has elements of the flat buffer's shard."""
        return slice(where.start - self.first, where.stop - self.first)


@dataclass(frozen=True)
class _Run:
    """Parameters of one group in a flat buffer: elements `where` of this rank's shard, and the state of their rule."""

    group: GroupSpec
    flat: FlatBuffer
    paths: Sequence[str]
    where: slice
    states: tuple[Tensor, ...]


class Optimizer:
    """The configured rule on every flat buffer; parameters that it does not take are updated by another.

    Attributes:
        state: state tensors of this rank, in the shape of its shards.
        home_state: state of the whole matrices whose home this rank is.
        qk_clip: what scales queries and keys after an update; None: nothing.
        averages: those of them that are moving averages of the weights; none without `ema_decay`.
        num_steps: number of updates so far, skipped ones not counted.
    """

    def __init__(
        self,
        buffers: Buffers,
        config: OptimizerConfig,
        loss_scale: LossScale | None = None,
        qk_clip: QKClip | None = None,
    ) -> None:
        self.qk_clip = qk_clip
        self.buffers, self.config = buffers, config
        self.loss_scale, self.rule = loss_scale, rule_of(config)
        self.state: list[StateShard] = []
        self.home_state: list[HomeState] = []
        self._groups: dict[GroupSpec, list[_Run]] = {}
        for flat in buffers.flat_buffers:
            for run in self._runs_of(flat):
                self._groups.setdefault(run.group, []).append(run)
        self._updates = {group: self._choose(group) for group in self._groups}
        kept = buffers.flat_buffers if config.ema_decay is not None else ()
        self.averages = [StateShard(EMA.name, flat, 0, flat.main.clone()) for flat in kept]
        self.state += self.averages
        self.num_steps = torch.zeros((), device=next((flat.main.device for flat in buffers.flat_buffers), None))

    @property
    def num_bytes(self) -> int:
        """Bytes of the state on this rank."""
        return sum(values.nbytes for values in self.state_values)

    @property
    def state_values(self) -> list[Tensor]:
        """All its state on this rank."""
        return [*(each.values for each in self.state), *(each.values for each in self.home_state)]

    def set_num_steps(self, num_steps: float) -> None:
        """Continue to count the updates, as bias corrections need, at `num_steps`."""
        self.num_steps.fill_(num_steps)

    def step(self, grad_norm: Tensor, lr: float, weight_decay: float | None = None, iteration: int = 0) -> Tensor:
        """Clip by the global norm and update; return 1.0 where a non-finite gradient skipped the update, else 0.0.

        Args:
            grad_norm: scalar, global norm of the unscaled gradients; those in the buffers are still scaled.
            weight_decay: factor of the learning rate by which weights decay; None: the configured one.
            iteration: steps of the run before this one.
        """
        factor = self._grad_factor(grad_norm)
        skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
        self.num_steps = self.num_steps.to(skipped.device)
        for group, runs in self._groups.items():
            tensors = replace(self._param_group(group, runs, factor, weight_decay), iteration=iteration)
            self._updates[group](tensors, self.config, lr * group.lr_mult, self.num_steps, skipped)
        self.num_steps += 1 - skipped
        if self.qk_clip is not None:
            self.qk_clip.apply(skipped)
        self._average(skipped)
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        self.buffers.publish()
        return skipped

    @torch.no_grad()
    def _average(self, skipped: Tensor) -> None:
        """Move the averages towards the updated weights; nothing changes where the update was skipped.

        Of the first updates each weighs more, so that the initial weights do not stay:

            decay of the t-th update = min(ema_decay, (1 + t) / (10 + t))
        """
        if self.config.ema_decay is None:
            return
        decay = ((1 + self.num_steps.double()) / (10 + self.num_steps)).clamp(max=self.config.ema_decay)
        weight = torch.where(skipped != 0, 0.0, 1 - decay)
        for shard in self.averages:
            shard.values.lerp_(shard.flat.main, weight.to(shard.values.dtype))

    @torch.no_grad()
    def restart_averages(self) -> None:
        """Let the averages begin with the current weights."""
        for shard in self.averages:
            shard.values.copy_(shard.flat.main)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """While entered, let the model compute with the averages of the weights; then bit for bit with the weights."""
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        """Exchange weights and their averages, in place and piece by piece."""
        self.buffers.settle()
        for shard in self.averages:
            size = CPU_CHUNK if shard.values.device.type == "cpu" else GPU_CHUNK
            for main, average in zip(shard.flat.main.split(size), shard.values.split(size), strict=True):
                kept = main.clone()
                main.copy_(average)
                average.copy_(kept)
        self.buffers.publish()

    def _grad_factor(self, grad_norm: Tensor) -> Tensor | None:
        """Return the factor that clips and unscales the gradients; None where it is 1."""
        clip_grad = self.config.clip_grad
        clipping = (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if clip_grad > 0 else None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        if not isinstance(scale, Tensor):
            return clipping
        return scale.reciprocal() if clipping is None else clipping / scale

    def _param_group(
        self, group: GroupSpec, runs: Sequence[_Run], factor: Tensor | None, weight_decay: float | None
    ) -> ParamGroup:
        """Return the tensors of a group; clip and unscale its gradients here unless its kernels do."""
        decay = group.wd_mult * (self.config.weight_decay if weight_decay is None else weight_decay)
        decay = decay / group.lr_mult if self.config.independent_weight_decay else decay
        grads, mains = [run.flat.grad[run.where] for run in runs], [run.flat.main[run.where] for run in runs]
        states = tuple([run.states[index] for run in runs] for index in range(len(group.rule.states)))
        if factor is not None and not group.rule.scales_grads:
            for grad in grads:
                grad.mul_(factor)
            factor = None
        return ParamGroup(decay, mains, grads, states, factor)

    def _runs_of(self, flat: FlatBuffer) -> Iterator[_Run]:
        """Allocate the state of a flat buffer's shard, and yield the parts of it that are updated alike."""
        groups = groups_of(self.config, {path: self.buffers.specs[path] for path in flat.spans})
        made: dict[str, list[StateShard]] = {}
        for rule, where in flat.runs(lambda path: groups[path].rule):
            made[rule.name] = []
            for each in rule.states:
                dtype = PRECISIONS[name] if (name := each.dtype(self.config)) else None
                values = torch.zeros_like(flat.main[where], dtype=dtype)
                made[rule.name].append(StateShard(each.name, flat, where.start, values))
            self.state += made[rule.name]
        found = list(flat.runs(groups.__getitem__))
        places = dict(found)
        assert len(places) == len(found), "parameters of a group are not neighbours"
        for group in dict.fromkeys(groups.values()):
            paths = [path for path in flat.spans if groups[path] == group]
            where = places.get(group, NOWHERE)
            if where != NOWHERE:
                states = tuple(shard.values[shard.place(where)] for shard in made[group.rule.name])
                yield _Run(group, flat, paths, where, states)
            elif group.rule.needs_matrices:  # others hold them, and this rank may be their home
                yield _Run(group, flat, paths, where, tuple(flat.main[where] for _ in group.rule.states))

    def _choose(self, group: GroupSpec) -> Update:
        """Return the update of a group of parameters."""
        name, runs = group.rule.name, self._groups[group]
        if group.rule.needs_matrices:
            shards = [(run.flat, run.paths, run.where) for run in runs]
            exchange = MatrixExchange(self.buffers, shards, group.rule, self.config)
            self.home_state += exchange.state
            return MATRIX_UPDATES[name](exchange)
        mains = [run.flat.main[run.where] for run in runs]
        return UPDATES[name](self.config, mains, [state for run in runs for state in run.states])


def learning_rate(config: OptimizerConfig, phases: LRPhases, position: int) -> float:
    """Return the learning rate at a position of the schedule (from 1): linear warm-up, decay, then `min_lr`."""
    if position <= phases.warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * position / phases.warmup
    if position > phases.end and config.lr_decay_style != "constant":
        return config.min_lr
    progress = (position - phases.warmup) / max(phases.end - phases.warmup, 1)
    return _DECAY[config.lr_decay_style](config, phases, progress, position)


def weight_decay(config: OptimizerConfig, phases: LRPhases, position: int) -> float:
    """Return the factor of the learning rate by which weights decay at a position of the schedule (from 1).

    It grows over the whole run as Megatron-LM's.  An independent decay follows the learning rate's schedule, but not
    its size (Loshchilov and Hutter 2019, arXiv:1711.05101; Wortsman et al. 2023, arXiv:2309.14322).
    """
    grows = _GROWTH.get(config.weight_decay_incr_style)
    decay = config.weight_decay
    if grows is not None and config.start_weight_decay is not None and config.end_weight_decay is not None:
        start, end = config.start_weight_decay, config.end_weight_decay
        decay = end if position > phases.length else start + (end - start) * grows(position / phases.length)
    return decay / config.lr if config.independent_weight_decay else decay


# Fraction of the growth of the weight decay by the fraction of the run.
_GROWTH: Mapping[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "cosine": lambda part: (1 - math.cos(math.pi * part)) / 2,
}


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
