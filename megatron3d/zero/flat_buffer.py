"""Flat buffers: neighbouring parameters that are reduced, sharded and updated together.

    params  | embedding.weight   | position | pad |     parameters of the network in the model's dtype
    main    | rank 0 | rank 1 | rank 2 | rank 3   |     this rank's shard of the master weights, fp32 or wider
    grad    | rank 0 | rank 1 | rank 2 | rank 3   |     this rank's shard of main_grad

A shard is a range of elements, regardless of the boundaries of parameters, so that collectives read and write the
buffers in place and nothing is copied to be sent.  (Rajbhandari et al. 2020, arXiv:1910.02054.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Comm, Pending
from megatron3d.linear.gemm import Operand
from megatron3d.parallel.layout import ParamSpec, Sharding, shard_numel
from megatron3d.parallel.mesh import PIPELINE, Axes, Link, Mesh
from megatron3d.zero.fp8_shard import Fp8Shard, Held, StoredWeight

G = TypeVar("G")
# Returns the parameters of a buffer in the order in which it holds them: those that are updated alike are neighbours.
InGroups = Callable[[Mapping[str, ParamSpec]], Mapping[str, ParamSpec]]


def by_decay(specs: Mapping[str, ParamSpec]) -> Mapping[str, ParamSpec]:
    """Return first the parameters with weight decay, then the others."""
    return dict(sorted(specs.items(), key=lambda item: not item[1].decay))


@dataclass(frozen=True)
class GradSync:
    """Ranks over which the gradients of parameters are reduced.

    Attributes:
        reduce_axes: axes over which gradients are summed.
        copies: number of ranks that hold the same shard.
        link: the two pipeline ranks that both hold a tied embedding; None for other parameters.
    """

    reduce_axes: Axes
    copies: int
    link: Link | None


@dataclass(frozen=True)
class FsdpUnit:
    """A module of a pipeline stage whose parameters, those below `path`, are all-gathered together.

    `in_backward`: backward needs them as well.
    """

    path: str
    module: nn.Module
    stage: int
    in_backward: bool

    def has(self, name: str) -> bool:
        """Return whether a parameter belongs to the unit."""
        return name.startswith(f"{self.path}.")


@dataclass(frozen=True)
class BufferKey:
    """Key of the parameters that may share a flat buffer.

    Attributes:
        sharding: ZeRO's, over axes that do not shard the parameters themselves, as those of experts do.
        unit: the FSDP unit if parameters are sharded.
        is_fp8: parameters are weights that are stored in fp8.
    """

    sync: GradSync
    sharding: Sharding
    stage: int
    unit: str | None
    is_fp8: bool = False


class FlatBuffer:
    """Flat buffer of parameters, master weights and gradients.

    Attributes:
        params: padded to equal shards of aligned lengths; without memory while parameters are sharded and not in use.
        main: this rank's shard of the master weights; a view of `params` (`is_view`) where the dtypes are equal.
        grad: this rank's shard of main_grad; if gradients are sharded, it is valid until the next step starts.
        spans: range of each parameter in `params`, in the order of `specs`.
        fp8: quantization of weights that are stored in fp8; None: parameters have the model's dtype.
    """

    def __init__(
        self,
        key: BufferKey,
        specs: Mapping[str, ParamSpec],
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        stored: Mapping[str, StoredWeight] | None = None,
    ) -> None:
        self.sync, self.stage = key.sync, key.stage
        self.sharding = sharding = key.sharding
        self.grads_per_microbatch = sum(spec.uses for spec in specs.values())
        self.spans: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, spec in specs.items():
            start, self.size = self.size, self.size + local_numel(spec, mesh)
            self.spans[name] = start, self.size
        ranks, index = mesh.size(sharding.axes), mesh.index(sharding.axes)
        part = shard_numel(self.size, ranks)
        self.shard, self.numel = slice(index * part, (index + 1) * part), ranks * part
        self.main_dtype = torch.promote_types(dtype, torch.float32)
        self.fp8 = Fp8Shard(self._held(specs, stored or {}, mesh), dtype, device) if key.is_fp8 else None
        kept = dtype if stored is None or not key.is_fp8 else next(iter(stored.values())).gemm.format
        self.params = torch.zeros(self.numel, dtype=kept, device=device)
        # Writing through another tensor of the same storage does not bump the version of weights that autograd saved.
        self.params_data = self.params.data
        self.is_view = kept == self.main_dtype and not sharding.params
        # This rank's shard in fp8, which outlives `params` where these are freed.
        self._own = self.params_data[self.shard] if not sharding.params else self.params.new_zeros(part * key.is_fp8)
        self.main = self.params[self.shard] if self.is_view else self._zeros(part)
        self.full_grad = None if sharding.grads else self._zeros(self.numel)
        self.grad = self._zeros(part) if self.full_grad is None else self.full_grad[self.shard]
        self._grad_views: dict[str, Tensor] = {}  # of full_grad, made once for all microbatches
        self._gather: Pending | None = None
        self._renew()

    def _held(
        self, specs: Mapping[str, ParamSpec], stored: Mapping[str, StoredWeight], mesh: Mesh
    ) -> Mapping[str, Held]:
        found = dict[str, Held]()
        for name, spec in specs.items():
            rows, features = spec.local_shape(mesh)
            found[name] = Held(stored[name], (rows, features), *self.shard_range(name))
        return found

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.main_dtype, device=self.params.device)

    def param(self, name: str, shape: Sequence[int]) -> nn.Parameter:
        """Return a parameter of the network as a view of the buffer."""
        low, high = self.spans[name]
        return nn.Parameter(self.params[low:high].view(*shape))

    def begin_step(self) -> None:
        """Let the next gradient of each parameter overwrite that of the last step."""
        if self.sharding.grads:
            self.grad = self.grad.new_empty(0)
        self._renew()

    def _renew(self) -> None:
        self.num_grads, self.num_reduced = 0, 0
        self._missing = set(self.spans)
        if self.full_grad is not None:
            self.full_grad[self.size :].zero_()  # a non-finite step may have left inf or NaN

    def count_grad(self, num_microbatches: int) -> bool:
        """Count one gradient; return whether the gradients of another `num_microbatches` are complete."""
        self.num_grads += 1
        return self.num_grads % (self.grads_per_microbatch * num_microbatches) == 0

    def main_grad(self, name: str, shape: Sequence[int]) -> tuple[Tensor, bool]:
        """Return the gradient buffer of a parameter, and whether it already holds gradients of this step."""
        if self.full_grad is None:
            self.full_grad = torch.empty(self.numel, dtype=self.main_dtype, device=self.params.device)
            self.full_grad[self.size :].zero_()
            self._missing = set(self.spans)
        has_values = name not in self._missing
        self._missing.discard(name)
        view = self._grad_views.get(name)
        if view is None:
            low, high = self.spans[name]
            view = self._grad_views[name] = self.full_grad[low:high].view(*shape)
        return view, has_values

    def take_grad(self) -> Tensor:
        """Return the gradients to be reduced; if gradients are sharded, the next microbatch gets a new buffer."""
        full_grad = self.full_grad
        assert full_grad is not None, "there is no gradient to reduce"
        for low, high in map(self.spans.__getitem__, self._missing):
            full_grad[low:high].zero_()
        if self.sharding.grads:
            self.full_grad = None
            self._grad_views.clear()
        return full_grad

    def store_reduced(self, total: Tensor) -> None:
        """Store this rank's shard of the reduced gradients, or add it if each microbatch has its own reduction."""
        if not self.sharding.grads:
            if total.untyped_storage()._cdata != self.grad.untyped_storage()._cdata:
                self.grad.copy_(total)
        elif self.num_reduced:
            self.grad.add_(total)
        else:
            self.grad = total.to(self.main_dtype)
        self.num_reduced += 1

    def runs(self, group_of: Callable[[str], G]) -> Iterator[tuple[G, slice]]:
        """Yield the group and the slice of this rank's shard of neighbouring parameters of one group.

        Padding belongs to the last one.
        """
        runs = [(group, self.spans[list(names)[-1]][1]) for group, names in groupby(self.spans, group_of)]
        start = 0
        for number, (group, end) in enumerate(runs, 1):
            stop = min(max(end - self.shard.start, 0), len(self.main)) if number < len(runs) else len(self.main)
            if start < stop:
                yield group, slice(start, stop)
            start = stop

    def shard_range(self, name: str) -> tuple[int, slice]:
        """Return the first element of a parameter that this rank updates, and their slice of `main` and `grad`."""
        start, stop = self._clipped(name, self.shard)
        offset = max(self.spans[name][0] + start - self.shard.start, 0)
        return start, slice(offset, offset + stop - start)

    def range_on(self, name: str, mesh: Mesh) -> tuple[int, int]:
        """Return the range of elements of a parameter that the rank of a mesh updates."""
        part, index = len(self.main), mesh.index(self.sharding.axes)
        return self._clipped(name, slice(index * part, (index + 1) * part))

    def _clipped(self, name: str, shard: slice) -> tuple[int, int]:
        low, high = self.spans[name]
        start, stop = (min(max(edge, low), high) - low for edge in (shard.start, shard.stop))
        return start, stop

    @property
    def is_allocated(self) -> bool:
        """Return whether `params` has memory."""
        return self.params.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Allocate `params` and copy this rank's shard into it."""
        if not self.is_allocated:
            self.params.untyped_storage().resize_(self.numel * self.params.element_size())
        if self.fp8 is None and not self.is_view:
            self.params_data[self.shard].copy_(self.main)
        elif self.fp8 is not None and self.sharding.params:
            self.params_data[self.shard].copy_(self._own)

    def measure(self) -> None:
        """Take the largest values of this rank's shard of weights that are stored in fp8."""
        if self.fp8 is not None:
            self.fp8.measure(self.main)

    def quantize(self) -> None:
        """Write this rank's shard of weights that are stored in fp8, once largest values are reduced."""
        if self.fp8 is not None:
            self.fp8.quantize(self.main, self._own)

    def operands(self) -> Iterator[tuple[str, Tensor, Operand]]:
        """Yield this rank's shards of weights that are stored in fp8, by path, before and after quantization."""
        if self.fp8 is not None:
            yield from self.fp8.operands(self.main, self._own)

    def start_gather(self, comm: Comm) -> None:
        """Allocate `params` and start to all-gather it."""
        self.allocate()
        sent = self.params_data if self.fp8 is None else self.params_data.view(torch.uint8)
        self._gather = comm.all_gather_into(sent, self.sharding.axes)

    @property
    def is_gathering(self) -> bool:
        """Return whether an all-gather of `params` is in flight."""
        return self._gather is not None

    def wait_for_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def free(self) -> None:
        """Free the memory of `params`."""
        assert self._gather is None, f"{', '.join(self.spans)} are freed while they are gathered"
        self.params.untyped_storage().resize_(0)

    @property
    def weights(self) -> list[Tensor]:
        """Return the tensors of parameters that are held between steps, without master weights."""
        whole = [] if self.sharding.params else [self.params]
        return whole if self.fp8 is None else [*(whole or [self._own]), *self.fp8.tables]

    @property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes held between steps, by kind."""
        weights = sum(each.nbytes for each in self.weights)
        grad = self.grad if self.sharding.grads or self.full_grad is None else self.full_grad
        return {"weights": weights + (0 if self.is_view else self.main.nbytes), "gradients": grad.nbytes}


def make_flat_buffers(
    stage_specs: Mapping[int, Mapping[str, ParamSpec]],
    unit_of: Mapping[str, str],
    sharding: Sharding,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bucket_bytes: float,
    in_groups: InGroups,
    stored: Mapping[str, StoredWeight],
) -> list[FlatBuffer]:
    """Return flat buffers for all parameters, in the order of the forward pass; weights that are stored in fp8 apart.

    A buffer is one bucket: at least `bucket_bytes` of gradients, counted from the end, where backward starts.  If
    parameters are sharded, it holds one FSDP unit.
    """
    specs = {name: spec for each in stage_specs.values() for name, spec in each.items()}
    groups: dict[BufferKey, list[str]] = {}
    for stage, each in stage_specs.items():
        for name, spec in each.items():
            unit = unit_of[name] if sharding.params else None
            own = sharding.without(spec.axes, mesh)
            groups.setdefault(BufferKey(_grad_sync(spec, own, mesh), own, stage, unit, name in stored), []).append(name)
    least = bucket_bytes / torch.promote_types(dtype, torch.float32).itemsize
    runs = [
        (key, run)
        for key, names in groups.items()
        for run in ([names] if sharding.params else _runs(names, specs, mesh, least))
    ]
    order = {name: index for index, name in enumerate(specs)}
    return [
        FlatBuffer(key, in_groups({name: specs[name] for name in run}), mesh, dtype, device, stored)
        for key, run in sorted(runs, key=lambda each: order[each[1][0]])
    ]


def local_numel(spec: ParamSpec, mesh: Mesh) -> int:
    """Return the number of elements of a parameter on this rank."""
    return math.prod(spec.local_shape(mesh))


def _grad_sync(spec: ParamSpec, sharding: Sharding, mesh: Mesh) -> GradSync:
    shared = mesh.without(mesh.names, (PIPELINE, *sharding.axes))
    copies = spec.num_copies(mesh, shared) * len(spec.holders)
    link = Link(PIPELINE, *sorted(spec.holders)) if len(spec.holders) > 1 else None
    return GradSync(spec.reduce_axes(mesh), copies, link)


def _runs(names: Sequence[str], specs: Mapping[str, ParamSpec], mesh: Mesh, least: float) -> Iterator[list[str]]:
    """Yield runs of neighbouring names with at least `least` elements each, filled from the end."""
    run: list[str] = []
    for name in reversed(names):
        run.insert(0, name)
        if sum(local_numel(specs[each], mesh) for each in run) >= least:
            yield run
            run = []
    if run:
        yield run


class GradReduction:
    """Reduction in flight; the constructor starts it."""

    def __init__(self, flat: FlatBuffer, comm: Comm, dtype: torch.dtype | None) -> None:
        self._flat, self._comm = flat, comm
        axes, reduced = flat.sharding.axes, flat.sync.reduce_axes
        self._rest = comm.mesh.without(reduced, axes) if axes else ()
        sent = flat.take_grad().to(dtype or flat.main_dtype)
        self._pending = comm.reduce_scatter(sent, axes, dim=0) if axes else comm.all_reduce(sent, reduced)

    def advance(self) -> bool:
        """Wait for the collective in flight, then start the next; after the last one store the sum and return True."""
        total, rest = self._pending.wait(), self._rest
        if rest:
            self._pending, self._rest = self._comm.all_reduce(total, rest), ()
        else:
            self._flat.store_reduced(total)
        return not rest
