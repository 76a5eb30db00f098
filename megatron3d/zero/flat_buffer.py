"""Flat pieces of memory: neighbouring parameters that are summed, shared out and updated together.

    whole   | embedding.weight   | position | pad |     what the network uses, in its own type
    main    | rank 0 | rank 1 | rank 2 | rank 3   |     what the optimizer updates, fp32 or better: my part of it
    grad    | rank 0 | rank 1 | rank 2 | rank 3   |     its gradient

A part is a range of elements, whatever parameters lie there, so that nothing is copied to be sent: every transfer goes
from, and to, a range of the same memory.  (Rajbhandari et al. 2020, arXiv:1910.02054.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Pending
from megatron3d.parallel.layout import ParamSpec, num_copies
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.p2p import Link
from megatron3d.parallel.sharding import Sharding


@dataclass(frozen=True)
class Kind:
    """What the parameters of a flat have in common; `link` joins the ends of a pipeline that both hold them."""

    reduce_axes: Axes
    copies: int
    link: Link | None


@dataclass(frozen=True)
class Block:
    """A module whose forward needs the parameters below `path` at one time, in a stage of the pipeline.

    Attributes:
        in_backward: whether backward needs their values, too.
    """

    path: str
    module: nn.Module
    stage: int
    in_backward: bool

    def has(self, name: str) -> bool:
        """Whether a parameter is one of them."""
        return name.startswith(f"{self.path}.")


@dataclass(frozen=True)
class Place:
    """Parameters that may share a flat: of one kind, one stage of the pipeline and, where it matters, one block."""

    kind: Kind
    stage: int
    block: str | None


class Flat:
    """One such piece.

    Attributes:
        whole: padded so that all parts are equally long; without memory while parameters are shared out and not in use.
        main: my part, a view of `whole` (`is_view`) where that is kept in the same type.
        grad: my part of the gradient; where gradients are shared out, of the last step until the next one begins.
        spans: where each parameter lies in `whole`: first what weight decay applies to, then the others.
    """

    def __init__(
        self,
        place: Place,
        specs: Mapping[str, ParamSpec],
        sharding: Sharding,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kind, self.stage, self.block, self.sharding = place.kind, place.stage, place.block, sharding
        self.num_uses = sum(spec.uses for spec in specs.values())
        self.spans: dict[str, tuple[int, int]] = {}
        self.size, self._num_decayed = 0, 0
        for name, spec in sorted(specs.items(), key=lambda item: not item[1].decay):
            start, self.size = self.size, self.size + local_numel(spec, mesh)
            self.spans[name] = start, self.size
            self._num_decayed = self.size if spec.decay else self._num_decayed
        ranks, index = mesh.size(sharding.axes), mesh.index(sharding.axes)
        part = -(-self.size // ranks)
        self.mine, self.numel = slice(index * part, (index + 1) * part), ranks * part
        self.main_dtype = torch.promote_types(dtype, torch.float32)
        self.whole = torch.zeros(self.numel, dtype=dtype, device=device)
        # Writing through another tensor of the same memory leaves alone autograd's count of changes to saved weights.
        self.raw = self.whole.data
        self.is_view = dtype == self.main_dtype and not sharding.params
        self.main = self.whole[self.mine] if self.is_view else self._zeros(part)
        self.whole_grad = None if sharding.grads else self._zeros(self.numel)
        self.grad = self._zeros(part) if self.whole_grad is None else self.whole_grad[self.mine]
        self.gathering: Pending | None = None
        self._renew()

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.main_dtype, device=self.whole.device)

    def param(self, name: str, shape: Sequence[int]) -> nn.Parameter:
        """The parameter that the network uses."""
        low, high = self.spans[name]
        return nn.Parameter(self.whole[low:high].view(*shape))

    def begin_step(self) -> None:
        """The next gradient of each parameter replaces that of the last step."""
        if self.sharding.grads:
            self.grad = self.grad.new_empty(0)
        self._renew()

    def _renew(self) -> None:
        self.num_arrived, self.num_reduced = 0, 0
        self._missing = set(self.spans)
        if self.whole_grad is not None:
            self.whole_grad[self.size :].zero_()  # a step that was not finite has left what it is there

    def main_grad(self, name: str, shape: Sequence[int]) -> tuple[Tensor, bool]:
        """Return the gradient buffer of a parameter, and whether it already holds gradients of this step."""
        if self.whole_grad is None:
            self.whole_grad = torch.empty(self.numel, dtype=self.main_dtype, device=self.whole.device)
            self.whole_grad[self.size :].zero_()
            self._missing = set(self.spans)
        low, high = self.spans[name]
        has_values = name not in self._missing
        self._missing.discard(name)
        return self.whole_grad[low:high].view(*shape), has_values

    def give_grad(self) -> Tensor:
        """All that was collected, to be reduced; where gradients are shared out the next one gets other memory."""
        whole_grad = self.whole_grad
        assert whole_grad is not None, "there is nothing to reduce"
        for low, high in map(self.spans.__getitem__, self._missing):
            whole_grad[low:high].zero_()
        if self.sharding.grads:
            self.whole_grad = None
        return whole_grad

    def take_sum(self, total: Tensor) -> None:
        """Keep my part of the sum over ranks; with gradients shared out, of one sum after another."""
        if not self.sharding.grads:
            if total.untyped_storage()._cdata != self.grad.untyped_storage()._cdata:
                self.grad.copy_(total)
        elif self.num_reduced:
            self.grad.add_(total)
        else:
            self.grad = total.to(self.main_dtype)
        self.num_reduced += 1

    @property
    def decayed_and_not(self) -> tuple[slice, slice]:
        """Where in my part weight decay applies, and where it does not."""
        part = len(self.main)
        cut = min(max(self._num_decayed - self.mine.start, 0), part)
        return slice(0, cut), slice(cut, part)

    def held(self, name: str) -> tuple[int, slice]:
        """The first of a parameter's elements that I update, and where they lie in `main` and `grad`."""
        low, high = self.spans[name]
        start, stop = (min(max(edge, low), high) for edge in (self.mine.start, self.mine.stop))
        offset = max(start - self.mine.start, 0)
        return start - low, slice(offset, offset + stop - start)

    @property
    def is_whole(self) -> bool:
        """Whether `whole` has memory."""
        return self.whole.untyped_storage().nbytes() > 0

    def remember(self) -> None:
        """Give `whole` memory, and put my part in."""
        if not self.is_whole:
            self.whole.untyped_storage().resize_(self.numel * self.whole.element_size())
        if not self.is_view:
            self.raw[self.mine].copy_(self.main)

    def forget(self) -> None:
        """Give the memory of `whole` back."""
        assert self.gathering is None, f"{', '.join(self.spans)} are forgotten while they are gathered"
        self.whole.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory that is held between steps."""
        weights = 0 if self.sharding.params else self.whole.nbytes
        grad = self.grad if self.sharding.grads or self.whole_grad is None else self.whole_grad
        return {"weights": weights + (0 if self.is_view else self.main.nbytes), "gradients": grad.nbytes}


def make_flats(
    stage_specs: Mapping[int, Mapping[str, ParamSpec]],
    block_of: Mapping[str, str],
    sharding: Sharding,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: float,
) -> list[Flat]:
    """Flats for all parameters, in the order of the forward pass.

    A flat has at least `bucket_bytes` of gradients, counted from the end, where backward begins; where parameters are
    shared out it is a block's.
    """
    specs = {name: spec for each in stage_specs.values() for name, spec in each.items()}
    groups: dict[Place, list[str]] = {}
    for stage, each in stage_specs.items():
        for name, spec in each.items():
            block = block_of[name] if sharding.params else None
            groups.setdefault(Place(_kind(spec, sharding, mesh), stage, block), []).append(name)
    least = bucket_bytes / torch.promote_types(dtype, torch.float32).itemsize
    runs = [
        (place, run)
        for place, names in groups.items()
        for run in ([names] if sharding.params else _runs(names, specs, mesh, least))
    ]
    order = {name: index for index, name in enumerate(specs)}
    return [
        Flat(place, {name: specs[name] for name in run}, sharding, mesh, dtype, device)
        for place, run in sorted(runs, key=lambda each: order[each[1][0]])
    ]


def local_numel(spec: ParamSpec, mesh: Mesh) -> int:
    """Elements of a parameter on this rank."""
    return math.prod(spec.local_shape(mesh))


def _kind(spec: ParamSpec, sharding: Sharding, mesh: Mesh) -> Kind:
    shared = tuple(axis for axis in mesh.names if axis not in ("pipeline", *sharding.axes))
    copies = num_copies(spec.layout, mesh, shared) * len(spec.holders)
    link = Link("pipeline", *sorted(spec.holders)) if len(spec.holders) > 1 else None
    return Kind(spec.reduce_axes(mesh), copies, link)


def _runs(names: Sequence[str], specs: Mapping[str, ParamSpec], mesh: Mesh, least: float) -> Iterator[list[str]]:
    """Neighbouring names of at least so many elements together, closed from the end."""
    run: list[str] = []
    for name in reversed(names):
        run.insert(0, name)
        if sum(local_numel(specs[each], mesh) for each in run) >= least:
            yield run
            run = []
    if run:
        yield run
