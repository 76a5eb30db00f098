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

from megatron3d.comm import Comm, Link, Pending
from megatron3d.layout import ParamSpec, num_copies
from megatron3d.mesh import Axes, Mesh


@dataclass(frozen=True)
class Kind:
    """What parameters of one flat buffer have in common; `link` joins the ends of a pipeline that both hold them."""

    reduce_axes: Axes
    copies: int
    decay: bool
    link: Link | None


@dataclass
class Bucket:
    """A run of a flat gradient buffer that is reduced in one piece."""

    grad: Tensor
    reduce_axes: Axes
    stage: int
    num_uses: int
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
        stage_specs: of its parameters by path, for each stage of the pipeline that the module holds; no bucket has
            parameters of two of them.
        dtype: of the parameters that the network uses; sums and the optimizer's copy are fp32 or better.
        bucket_bytes: a bucket is closed when it has at least so many bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_specs: Mapping[int, Mapping[str, ParamSpec]],
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: float,
    ) -> None:
        self.comm = comm
        self.specs = {name: spec for specs in stage_specs.values() for name, spec in specs.items()}
        self._stage_of = {name: stage for stage, specs in stage_specs.items() for name in specs}
        self._fresh: set[str] = set()
        self.flats = [
            _allocate(kind, names, self.specs, comm.mesh, dtype, device)
            for kind, names in _kinds(self.specs, comm.mesh)
        ]
        for flat in self.flats:
            self._attach(model, flat, bucket_bytes)

    def _attach(self, model: nn.Module, flat: Flat, bucket_bytes: float) -> None:
        for names in self._bucket_names(flat, bucket_bytes):
            low, high = flat.spans[names[0]][0], flat.spans[names[-1]][1]
            num_uses = sum(self.specs[name].uses for name in names)
            bucket = Bucket(flat.grad[low:high], flat.kind.reduce_axes, self._stage_of[names[0]], num_uses)
            flat.buckets.append(bucket)
            for name in names:
                self._give_memory(model, flat, name, bucket)

    def _bucket_names(self, flat: Flat, bucket_bytes: float) -> Iterator[list[str]]:
        """Runs of neighbouring parameters of at least `bucket_bytes`, closed from the end, where backward begins, and
        where a stage begins."""
        names: list[str] = []
        size = 0.0
        for name, (low, high) in reversed(list(flat.spans.items())):
            if names and (size >= bucket_bytes or self._stage_of[name] != self._stage_of[names[0]]):
                yield names
                names, size = [], 0.0
            names.insert(0, name)
            size += (high - low) * flat.grad.element_size()
        yield names

    def _give_memory(self, model: nn.Module, flat: Flat, name: str, bucket: Bucket) -> None:
        owner, _, leaf = name.rpartition(".")
        shape = self.specs[name].local_shape(self.comm.mesh)
        param = nn.Parameter(flat.view(flat.model, name, shape))
        setattr(model.get_submodule(owner), leaf, param)
        grad = flat.view(flat.grad, name, shape)

        def collect(param: Tensor) -> None:
            if param.grad is None:
                return  # put off: autograd tells of nothing as well
            (grad.copy_ if name in self._fresh else grad.add_)(param.grad)
            self._fresh.discard(name)
            param.grad = None
            self._arrived(bucket)

        param.register_post_accumulate_grad_hook(collect)

    def _arrived(self, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        if bucket.num_missing == 0:
            bucket.pending = self.comm.all_reduce(bucket.grad, bucket.reduce_axes)

    def begin_step(self, num_microbatches: int) -> None:
        """Gradients of so many microbatches will come; the first of each parameter replaces that of the last step."""
        self._fresh = set(self.specs)
        for bucket in (bucket for flat in self.flats for bucket in flat.buckets):
            bucket.num_missing, bucket.pending = bucket.num_uses * num_microbatches, None

    def check_stage(self, stage: int) -> None:
        """Hold that the sums of a stage's gradients are under way, now that its last microbatch is through."""
        for bucket in (bucket for flat in self.flats for bucket in flat.buckets):
            missing = bucket.num_missing if bucket.stage == stage else 0
            assert missing == 0, f"{missing} gradients of stage {stage} never arrived"

    def reduce_grads(self) -> None:
        """Wait until every gradient is summed over its axes (the gradient rule), and over its holders."""
        for flat in self.flats:
            for bucket in flat.buckets:
                assert bucket.pending is not None, f"{bucket.num_missing} gradients of a bucket never arrived"
                bucket.pending.wait()
            if flat.kind.link is not None:
                self.comm.add(flat.grad, flat.kind.link).wait()

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
        copies = num_copies(spec.layout, mesh, shared) * len(spec.holders)
        link = Link("pipeline", *sorted(spec.holders)) if len(spec.holders) > 1 else None
        kind = Kind(spec.reduce_axes(mesh), copies, spec.decay, link)
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
