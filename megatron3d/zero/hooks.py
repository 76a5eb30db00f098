"""Hooks that all-gather the parameters of an FSDP unit before its forward and backward, and free them after.

    compute       embedding | layer 0 | layer 1 | norm, head | layer 1 | layer 0     (forward, then backward)
    all-gathers   layer 0   | layer 1 | norm    | layer 1    | layer 0               (prefetch of the next unit)

Hooks are registered on modules and on the tensors between them; the model code does not refer to sharding (Zhao et al.
2023, arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron3d.zero.flat_buffer import FsdpUnit

# Backward starts with a norm, whose compute is too short to hide the all-gather of a layer.
UNITS_PREFETCHED_BY_HEAD = 2


class UnitParameters(Protocol):
    """Parameters of FSDP units, by the unit's path."""

    def start_unshard(self, path: str) -> None:
        """Start to all-gather the parameters of a unit."""
        ...

    def wait_for_unshard(self, path: str) -> None:
        """Wait until the parameters of a unit are gathered."""
        ...

    def reshard(self, path: str) -> None:
        """Free the gathered parameters."""
        ...


class UnitNeighbours(NamedTuple):
    """Neighbours of an FSDP unit: the units before and after it in its stage, and those to prefetch for backward."""

    unit: FsdpUnit
    before: Sequence[FsdpUnit]
    after: Sequence[FsdpUnit]
    backward: Sequence[FsdpUnit]


def register_wait_hooks(params: UnitParameters, units: Sequence[FsdpUnit]) -> None:
    """Make each unit wait for its parameters, which are all-gathered once per step and kept (ZeRO stages 1 and 2)."""
    for unit in units:
        unit.module.register_forward_pre_hook(lambda *_, path=unit.path: params.wait_for_unshard(path))


def register_unshard_hooks(params: UnitParameters, units: Sequence[FsdpUnit]) -> None:
    """All-gather each unit's parameters before its forward and backward, and free them afterwards (ZeRO stage 3)."""
    in_backward_now: set[str] = set()
    for at in _neighbours(units):
        _hook_forward(params, at, in_backward_now)
        if at.unit.in_backward:
            _hook_backward(params, at, in_backward_now)


def _neighbours(units: Sequence[FsdpUnit]) -> Iterator[UnitNeighbours]:
    for stage in dict.fromkeys(unit.stage for unit in units):
        in_stage = [unit for unit in units if unit.stage == stage]
        in_backward = [unit for unit in in_stage if unit.in_backward]
        for index, unit in enumerate(in_stage):
            is_head = unit is in_stage[-1] and not unit.in_backward
            before, after = in_stage[max(index - 1, 0) : index], in_stage[index + 1 : index + 2]
            yield UnitNeighbours(
                unit,
                [other for other in before if other.in_backward],
                after,
                in_backward[::-1][:UNITS_PREFETCHED_BY_HEAD] if is_head else [],
            )


def _gather(params: UnitParameters, unit: FsdpUnit, prefetched: Sequence[FsdpUnit]) -> None:
    params.start_unshard(unit.path)
    params.wait_for_unshard(unit.path)
    for other in prefetched:
        params.start_unshard(other.path)


def _hook_forward(params: UnitParameters, at: UnitNeighbours, in_backward_now: set[str]) -> None:
    path = at.unit.path
    used_next = {path, *(unit.path for unit in at.after)}

    def before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        is_recomputed = path in in_backward_now
        backward = at.backward if torch.is_grad_enabled() else []
        _gather(params, at.unit, [] if is_recomputed else [*at.after, *backward])

    def after_forward(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        # In a recomputation backward uses this unit next, or the one after it, which has prefetched this one: it stays.
        if in_backward_now.isdisjoint(used_next):
            params.reshard(path)

    at.unit.module.register_forward_pre_hook(before_forward)
    at.unit.module.register_forward_hook(after_forward)


def _hook_backward(params: UnitParameters, at: UnitNeighbours, in_backward_now: set[str]) -> None:
    path = at.unit.path

    def after_backward(path: str) -> None:
        in_backward_now.discard(path)
        params.reshard(path)

    def before_backward(_: Tensor) -> None:
        for finished in at.after:
            after_backward(finished.path)
        in_backward_now.add(path)
        _gather(params, at.unit, at.before)

    def hook_y(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(before_backward)

    def hook_x(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = next((arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad), None)
        if x is not None and torch.is_grad_enabled():
            x.register_hook(lambda _: after_backward(path))

    at.unit.module.register_forward_hook(hook_y)
    if not at.before:
        at.unit.module.register_forward_pre_hook(hook_x)
