"""Buffers of parameters and gradients, and their communication over data ranks (ZeRO stages 0 to 3).

              gradients                                    parameters
    stage 0   all-reduced                                  replicated, updated by every rank
    stage 1   reduce-scattered after the last microbatch   replicated; updated shards are gathered during the forward
    stage 2   reduce-scattered after each microbatch       as in stage 1
    stage 3   as in stage 2                                sharded; gathered for an FSDP unit's forward and backward

    compute       embedding | layer 0 | layer 1 | norm, head | layer 1 | layer 0     (forward, then backward)
    all-gathers   layer 0   | layer 1 | norm    | layer 1    | layer 0               (prefetch of the next unit)

Every collective starts as soon as its input is complete and is waited for when its result is needed.  Gradients are
summed in fp32 or wider.  Hooks of stage 3 are registered on modules and on the tensors between them; the model code
does not refer to sharding.  (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Comm
from megatron3d.linear.fp8_plan import reduced_axes
from megatron3d.linear.gemm import Operand
from megatron3d.linear.main_grad import MainGrads
from megatron3d.parallel.layout import ParamSpec, Sharding
from megatron3d.parallel.mesh import DATA, Axes
from megatron3d.zero.flat_buffer import FlatBuffer, FsdpUnit, GradReduction, InGroups, by_decay, make_flat_buffers
from megatron3d.zero.fp8_shard import StoredWeight

# Backward starts with a norm, whose compute is too short to hide the all-gather of a layer.
UNITS_PREFETCHED_BY_HEAD = 2


class UnitNeighbours(NamedTuple):
    """Neighbours of an FSDP unit: the units before and after it in its stage, and those to prefetch for backward."""

    unit: FsdpUnit
    before: Sequence[FsdpUnit]
    after: Sequence[FsdpUnit]
    backward: Sequence[FsdpUnit]


def register_wait_hooks(params: Buffers, units: Sequence[FsdpUnit]) -> None:
    """Make each unit wait for its parameters, which are all-gathered once per step and kept (ZeRO stages 1 and 2)."""
    for unit in units:
        unit.module.register_forward_pre_hook(lambda *_, path=unit.path: params.wait_for_unshard(path))


def register_unshard_hooks(params: Buffers, units: Sequence[FsdpUnit]) -> None:
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


def _gather(params: Buffers, unit: FsdpUnit, prefetched: Sequence[FsdpUnit]) -> None:
    params.start_unshard(unit.path)
    params.wait_for_unshard(unit.path)
    for other in prefetched:
        params.start_unshard(other.path)


def _hook_forward(params: Buffers, at: UnitNeighbours, in_backward_now: set[str]) -> None:
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


def _hook_backward(params: Buffers, at: UnitNeighbours, in_backward_now: set[str]) -> None:
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


REPLICATED = Sharding()
# All-gathers of updated parameters in flight while a unit computes.  A second one would wait for the first, and with
# CUDA_DEVICE_MAX_CONNECTIONS=1 everything launched after it would wait as well.
GATHERS_AHEAD = 1


class Buffers:
    """Parameters, main_grad and master weights of a model in flat buffers.

    Args:
        model: module whose parameters have no memory yet; the constructor allocates it.
        stage_specs: specs of its parameters by path, for each pipeline stage that the module holds.
        dtype: dtype of the parameters; main_grad and master weights are fp32 or wider.
        bucket_bytes: size of a bucket of gradients that are reduced together.
        in_groups: order of the parameters in a flat buffer: group after group of those that are updated alike.
        sharding: state that is sharded, and the axes over which it is sharded.
        units: FSDP units in the order of the forward pass; every parameter is in one.
        reduce_dtype: dtype in which gradients are reduced over data ranks; None: that of main_grad.
        axes_dtype: dtype in which tensor axes reduce weight gradients; None: that of main_grad.
        main_grads: registry to which each parameter's gradient buffer is added; None: a new one.
        stored: weights that are stored in fp8, quantized once per step, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_specs: Mapping[int, Mapping[str, ParamSpec]],
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: float,
        *,
        in_groups: InGroups = by_decay,
        sharding: Sharding = REPLICATED,
        units: Sequence[FsdpUnit] = (),
        reduce_dtype: torch.dtype | None = None,
        axes_dtype: torch.dtype | None = None,
        main_grads: MainGrads | None = None,
        stored: Mapping[str, StoredWeight] = MappingProxyType({}),
    ) -> None:
        self.comm, self.sharding = comm, sharding
        self._reduce_dtype, self.axes_dtype = reduce_dtype, axes_dtype
        self.specs = {name: spec for specs in stage_specs.values() for name, spec in specs.items()}
        unit_of = {name: unit.path for unit in units for name in self.specs if unit.has(name)}
        assert not sharding.axes or unit_of.keys() == self.specs.keys(), "some parameters are in no FSDP unit"
        self.flat_buffers = make_flat_buffers(
            stage_specs,
            unit_of,
            sharding,
            comm.mesh,
            dtype,
            device,
            bucket_bytes=bucket_bytes,
            in_groups=in_groups,
            stored={name: stored[name] for name in self.specs if name in stored},
        )
        # Reductions run one after another if each has a buffer of its own, or if each consists of two collectives.
        is_grouped = bool(sharding.axes) and comm.mesh.sizes[DATA[0]] > 1
        self._is_sequential = sharding.grads or reduce_dtype is not None or is_grouped
        self._num_microbatches = 1
        self._to_gather: deque[FlatBuffer] = deque()
        self._reductions: list[GradReduction] = []
        registry = main_grads or MainGrads()
        for flat in self.flat_buffers:
            for name in flat.spans:
                self._place_param(model, flat, name, registry)
            if sharding.params:
                flat.free()
        self._buffers_of = {
            unit.path: [flat for flat in self.flat_buffers if any(map(unit.has, flat.spans))] for unit in units
        }
        if sharding.axes:
            (register_unshard_hooks if sharding.params else register_wait_hooks)(self, units)

    def _place_param(self, model: nn.Module, flat: FlatBuffer, name: str, main_grads: MainGrads) -> None:
        owner, _, leaf = name.rpartition(".")
        param = flat.param(name, self.specs[name].local_shape(self.comm.mesh))
        setattr(model.get_submodule(owner), leaf, param)
        main_grads.register(param, _MainGradView(self, flat, name, param.shape))

    def begin_step(self, num_microbatches: int) -> None:
        """Prepare for the gradients of `num_microbatches`; the first of each parameter overwrites the last step's."""
        self._num_microbatches = num_microbatches
        for flat in self.flat_buffers:
            flat.begin_step()

    def count_grad(self, flat: FlatBuffer) -> None:
        """Count one gradient; start the reduction after all microbatches, or after each if gradients are sharded."""
        if not flat.count_grad(1 if self.sharding.grads else self._num_microbatches):
            return
        if self._is_sequential:
            self._advance()
        self._reductions.append(GradReduction(flat, self.comm, self._reduce_dtype))

    def _advance(self) -> None:
        """Wait for the current collective of each reduction in flight, and start its next one."""
        self._reductions = [reduction for reduction in self._reductions if not reduction.advance()]

    def check_stage(self, stage: int) -> None:
        """Assert that all gradients of a stage are complete, after its last microbatch."""
        for flat in self.flat_buffers:
            missing = flat.grads_per_microbatch * self._num_microbatches - flat.num_grads if flat.stage == stage else 0
            assert missing == 0, f"{missing} gradients of stage {stage} never arrived: of {', '.join(flat.spans)}"

    def reduce_grads(self) -> None:
        """Wait until every gradient is summed over its axes (the gradient rule) and its link."""
        for stage in {flat.stage for flat in self.flat_buffers}:
            self.check_stage(stage)
        while self._reductions:
            self._advance()
        for flat in self.flat_buffers:
            if flat.sync.link is not None:
                self.comm.all_reduce_pair(flat.grad, flat.sync.link).wait()

    def square_norm(self) -> Tensor:
        """Return this rank's share of the squared global gradient norm: local squares over copies (the norm rule)."""
        return torch.stack([square_sum(flat.grad) / flat.sync.copies for flat in self.flat_buffers]).sum()

    def publish(self) -> None:
        """Let the next forward use the updated parameters: start the first all-gather; at ZeRO stage 3 free them."""
        self.settle()
        self._quantize()
        if self.sharding.params:
            for flat in self.flat_buffers:
                flat.free()
            return
        self._to_gather = deque(self.flat_buffers)
        self._start_gathers(GATHERS_AHEAD if self.sharding.axes else len(self.flat_buffers))

    def _quantize(self) -> None:
        """Quantize this rank's shards of weights that are stored in fp8, with the largest values of whole blocks."""
        for flat in self.flat_buffers:
            flat.measure()
        shards = [(flat, flat.fp8) for flat in self.flat_buffers if flat.fp8 is not None]
        self._reduce_largest([(flat.sharding.axes, fp8.all_largest) for flat, fp8 in shards])
        self._reduce_largest(
            [
                (reduced_axes(each.stored.gemm.recipe.w, self.specs[name].layout, self.comm.mesh), fp8.largest[name])
                for _, fp8 in shards
                for name, each in fp8.weights.items()
            ]
        )
        for flat in self.flat_buffers:
            flat.quantize()

    def operands(self) -> Iterator[tuple[str, Tensor, Operand]]:
        """Yield this rank's shards of weights that are stored in fp8, by path, before and after quantization."""
        for flat in self.flat_buffers:
            yield from flat.operands()

    def _reduce_largest(self, values: Sequence[tuple[Axes, Tensor]]) -> None:
        """Reduce largest values in place, all of the same axes together."""
        for axes in dict.fromkeys(axes for axes, _ in values if axes):
            parts = [part for other, part in values if other == axes]
            whole = self.comm.all_reduce(torch.cat([part.flatten() for part in parts]), axes, op="max").wait()
            for part, reduced in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                part.copy_(reduced.view_as(part))

    def _start_gathers(self, count: int) -> None:
        """Start the next all-gathers of updated parameters, in the order of their use."""
        for _ in range(min(count, len(self._to_gather))):
            self._to_gather.popleft().start_gather(self.comm)

    def settle(self) -> None:
        """All-gather all updated parameters and wait, so that they may be read and `main` may be written."""
        self._start_gathers(len(self._to_gather))
        for flat in self.flat_buffers:
            flat.wait_for_gather()

    def start_unshard(self, path: str) -> None:
        """Start to all-gather the parameters of the FSDP unit `path`, unless they are gathered or in flight."""
        for flat in self._buffers_of[path]:
            if not flat.is_allocated:
                flat.start_gather(self.comm)

    def wait_for_unshard(self, path: str) -> None:
        """Wait until the parameters of a unit are gathered; start to all-gather those that are used next."""
        last = max((index for index, flat in enumerate(self._to_gather) if flat in self._buffers_of[path]), default=-1)
        self._start_gathers(last + 1)
        for flat in self._buffers_of[path]:
            flat.wait_for_gather()
        in_flight = sum(flat.is_gathering for flat in self.flat_buffers) if self._to_gather else 0
        self._start_gathers(GATHERS_AHEAD - in_flight)

    def unshard(self, path: str) -> None:
        """All-gather the parameters of a unit and wait for them."""
        self.start_unshard(path)
        self.wait_for_unshard(path)

    def reshard(self, path: str) -> None:
        """Free the parameters of a unit if parameters are sharded."""
        for flat in self._buffers_of[path] if self.sharding.params else ():
            flat.free()

    def shards(self, which: str) -> Iterator[tuple[str, int, Tensor]]:
        """Yield each parameter's name, the first element of this rank's shard, and the shard (`which`: main, grad)."""
        for flat in self.flat_buffers:
            for name in flat.spans:
                start, where = flat.shard_range(name)
                yield name, start, getattr(flat, which)[where]


@dataclass(frozen=True)
class _MainGradView:
    """main_grad of one parameter: a view of its flat buffer of gradients."""

    buffers: Buffers
    flat: FlatBuffer
    name: str
    shape: torch.Size

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.buffers.axes_dtype or self.flat.main_dtype

    def open(self) -> tuple[Tensor, bool]:
        return self.flat.main_grad(self.name, self.shape)

    def close(self) -> None:
        self.buffers.count_grad(self.flat)


def square_sum(flat: Tensor, row: int = 4096) -> Tensor:
    """Return the sum of squares of `flat` [n] as a scalar, in two levels and without a temporary of the same size.

    On a CPU torch sums a norm over all values sequentially: 3e-3 off for 30 million fp32 values, 1e-7 in rows.
    """
    whole = len(flat) // row * row
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1)
    rest: Tensor = torch.linalg.vector_norm(flat[whole:])
    return rows.square().sum() + rest.square()
