"""The data axis: where parameters and gradients live, and how gradients are summed.

Parameters that are reduced over the same axes, copied equally often and decayed alike share flat buffers, in the order
of the forward pass.  Backward fills a buffer from its end; each bucket is reduced as soon as its last gradient of the
step is there, under the rest of backward.  Sums are kept in fp32 or better, beside parameters of lower precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron3d.comm import Comm, Pending
from megatron3d.layout import ParamSpec, num_copies
from megatron3d.mesh import Axes, Mesh


@dataclass(frozen=True)
class Kind:
    """What parameters of one flat buffer have in common."""

    reduce_axes: Axes
    copies: int
    decay: bool


@dataclass
class Bucket:
    """A run of a flat gradient buffer that is reduced in one piece."""

    grad: Tensor
    reduce_axes: Axes
    num_params: int
    num_missing: int = 0
    pending: Pending | None = None


@dataclass
class Flat:
    """Flat tensors of one kind: `main` is updated by the optimizer, `model` is used by the network (often the same)."""

    kind: Kind
    main: Tensor
    model: Tensor
    grad: Tensor
    spans: Mapping[str, tuple[int, int]]
    buckets: list[Bucket] = field(default_factory=list)

    def view(self, flat: Tensor, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """A parameter's part of one of the flat tensors."""
        low, high = self.spans[name]
        return flat[low:high].view(shape)


class Buffers:
    """Memory of a model's parameters and gradients, ZeRO stage 0: every data rank keeps everything it holds.

    Args:
        model: a module whose parameters have no memory yet; they get it here.
        dtype: of the parameters that the network uses; sums and the optimizer's copy are fp32 or better.
        bucket_bytes: a bucket is closed when it has at least so many bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, ParamSpec],
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: float,
    ) -> None:
        self.comm, self.specs = comm, specs
        self.flats = [
            _allocate(kind, names, specs, comm.mesh, dtype, device) for kind, names in _kinds(specs, comm.mesh)
        ]
        self._is_first = True
        for flat in self.flats:
            self._attach(model, flat, bucket_bytes)

    def _attach(self, model: nn.Module, flat: Flat, bucket_bytes: float) -> None:
        for names in _bucket_names(flat, bucket_bytes):
            low, high = flat.spans[names[0]][0], flat.spans[names[-1]][1]
            bucket = Bucket(flat.grad[low:high], flat.kind.reduce_axes, len(names))
            flat.buckets.append(bucket)
            for name in names:
                self._give_memory(model, flat, name, bucket)

    def _give_memory(self, model: nn.Module, flat: Flat, name: str, bucket: Bucket) -> None:
        owner, _, leaf = name.rpartition(".")
        shape = self.specs[name].local_shape(self.comm.mesh)
        param = nn.Parameter(flat.view(flat.model, name, shape))
        setattr(model.get_submodule(owner), leaf, param)
        grad = flat.view(flat.grad, name, shape)

        def collect(param: Tensor) -> None:
            assert param.grad is not None, f"{name} has no gradient"
            (grad.copy_ if self._is_first else grad.add_)(param.grad)
            param.grad = None
            self._arrived(bucket)

        param.register_post_accumulate_grad_hook(collect)

    def _arrived(self, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        if bucket.num_missing == 0:
            bucket.pending = self.comm.all_reduce(bucket.grad, bucket.reduce_axes)

    def begin_microbatch(self, index: int, count: int) -> None:
        """Gradients of the first microbatch replace those of the last step; those of the last one are final."""
        self._is_first = index == 0
        if index == count - 1:
            for bucket in (bucket for flat in self.flats for bucket in flat.buckets):
                bucket.num_missing, bucket.pending = bucket.num_params, None

    def reduce_grads(self) -> None:
        """Wait until every gradient is summed over its axes (the gradient rule)."""
        for flat in self.flats:
            for bucket in flat.buckets:
                assert bucket.pending is not None, f"{bucket.num_missing} gradients of a bucket never arrived"
                bucket.pending.wait()

    def square_norm(self) -> Tensor:
        """My part of the squared global gradient norm: local squares over the number of copies (the norm rule)."""
        return torch.stack([square_sum(flat.grad) / flat.kind.copies for flat in self.flats]).sum()

    def publish(self) -> None:
        """Give the network what the optimizer has updated."""
        for flat in self.flats:
            if flat.model is not flat.main:
                flat.model.copy_(flat.main)

    def named(self, which: str) -> Iterator[tuple[str, ParamSpec, Tensor]]:
        """Every parameter's name, spec and view of the flat tensor `which` ("main", "model" or "grad")."""
        for flat in self.flats:
            for name in flat.spans:
                spec = self.specs[name]
                yield name, spec, flat.view(getattr(flat, which), name, spec.local_shape(self.comm.mesh))


def square_sum(flat: Tensor, row: int = 4096) -> Tensor:
    """Sum of squares in two levels, without a temporary of the same size.

    torch adds a norm over everything one by one on a CPU: 3e-3 off for 30 million fp32 values, 1e-7 in rows.
    """
    whole = len(flat) // row * row
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1)
    rest: Tensor = torch.linalg.vector_norm(flat[whole:])
    return rows.square().sum() + rest.square()


def _kinds(specs: Mapping[str, ParamSpec], mesh: Mesh) -> Iterator[tuple[Kind, list[str]]]:
    shared = tuple(axis for axis in mesh.names if axis != "pipeline")
    groups: dict[Kind, list[str]] = {}
    for name, spec in specs.items():
        kind = Kind(spec.reduce_axes(mesh), num_copies(spec.layout, mesh, shared), spec.decay)
        groups.setdefault(kind, []).append(name)
    yield from groups.items()


def _allocate(
    kind: Kind,
    names: list[str],
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
) -> Flat:
    spans, size = {}, 0
    for name in names:
        length = torch.Size(specs[name].local_shape(mesh)).numel()
        spans[name], size = (size, size + length), size + length
    main_dtype = torch.promote_types(dtype, torch.float32)
    main = torch.zeros(size, dtype=main_dtype, device=device)
    model = main if dtype == main_dtype else torch.zeros(size, dtype=dtype, device=device)
    return Flat(kind, main, model, torch.zeros(size, dtype=main_dtype, device=device), spans)


def _bucket_names(flat: Flat, bucket_bytes: float) -> Iterator[list[str]]:
    """Runs of neighbouring parameters of at least `bucket_bytes`, closed from the end, where backward begins."""
    names: list[str] = []
    size = 0.0
    for name, (low, high) in reversed(list(flat.spans.items())):
        names.insert(0, name)
        size += (high - low) * flat.grad.element_size()
        if size >= bucket_bytes:
            yield names
            names, size = [], 0.0
    if names:
        yield names
