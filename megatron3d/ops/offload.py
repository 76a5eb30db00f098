"""Offloading of saved activations to host memory, on side streams.

    compute   | F layer 0 | F layer 1      | F layer 2      | ...  | B layer 2      | B layer 1      | B layer 0
    out                   | 0 to the host  | 1 to the host  | 2
    in                                                         2   | 1 to the device | 0 to the device

A group is what one layer saves, or one run of recomputed layers.  The device holds two groups at a time: in forward the
one that is computed and the one that leaves; in backward the one that is used and the one before it, which is fetched
meanwhile.  The last group is used first and is still on the device if its backward follows at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron3d.ops.side_stream import SideStream, SideWork, host_memory, side_stream

_ALIGNMENT = 512


class _Saved:
    """Memory of one or more tensors that autograd saved: bytes on the device (`here`), on the host (`there`), or both.

    It lives as long as autograd needs one of the tensors.
    """

    def __init__(self, here: Tensor, group: _Group) -> None:
        self.here: Tensor | None = here
        self.there: Tensor | None = None
        self.group = group

    def place_on_host(self, there: Tensor) -> tuple[Tensor, Tensor]:
        """Take host memory; return the copy that fills it, as output and input."""
        assert self.here is not None, "it is on the device"
        self.there = there
        return there, self.here

    def place_on_device(self, here: Tensor) -> tuple[Tensor, Tensor]:
        """Take device memory; return the copy that fills it, as output and input."""
        assert self.there is not None, "it is on the host"
        self.here = here
        return here, self.there

    def free(self) -> None:
        """Give up the device's memory."""
        self.here = None


class _View(NamedTuple):
    """What autograd keeps in the place of a tensor."""

    saved: _Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Group:
    """Tensors saved by one layer of one microbatch; `before` is the group of the layer before it."""

    def __init__(self, offload: ActivationOffload, before: _Group | None) -> None:
        self.before = before
        self._offload = offload
        self._members: list[weakref.ref[_Saved]] = []
        self._arrivals: list[SideWork] = []
        self._is_in_use = False

    def members(self) -> list[_Saved]:
        """Return the memory that autograd still needs."""
        return [saved for each in self._members if (saved := each()) is not None]

    def start_to_host(self, members: list[weakref.ref[_Saved]]) -> SideWork:
        """Start to copy what autograd needs to a slab of host memory, which returns to the pool with this group."""
        self._members = members
        here = [(saved, saved.here) for saved in self.members() if saved.here is not None]
        slab = self._offload.take_slab(sum(_aligned(x.nbytes) for _, x in here))
        weakref.finalize(self, _give_back, self._offload.slabs, slab, self._arrivals)
        start, copies = 0, []
        for saved, x in here:
            copies.append(saved.place_on_host(slab[start : start + x.nbytes]))
            start += _aligned(x.nbytes)
        return self._offload.outward.run(lambda: _copy(copies))

    def fetch(self) -> None:
        """Start to copy to the device what is not there."""
        copies = []
        for saved in self.members():
            if saved.here is None and saved.there is not None:
                copies.append(saved.place_on_device(self._offload.empty(saved.there.nbytes)))
        if copies:
            self._arrivals.append(self._offload.inward.run(lambda: _copy(copies)))

    def use(self) -> None:
        """Bring everything to the device, let the computation wait for it, and fetch the group before meanwhile."""
        if self._is_in_use:
            return
        self._is_in_use = True
        self.fetch()
        while self._arrivals:
            self._arrivals.pop().hold_compute()
        if self.before is not None:
            self.before.fetch()

    def free(self) -> None:
        """Free the device's memory."""
        self._is_in_use = False
        for saved in self.members():
            saved.free()


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    for out, x in copies:
        out.copy_(x, non_blocking=True)


def _give_back(slabs: list[Tensor], slab: Tensor, arrivals: list[SideWork]) -> None:
    """Return a slab to the pool; what still arrives from it was not needed, but must not be overtaken."""
    for work in arrivals:
        work.hold_compute()
    slabs.append(slab)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class ActivationOffload:
    """Offloading of the activations of one model.

    Args:
        make_stream: returns a new side stream of a device.

    Attributes:
        slabs: host memory that is not in use.  It stays page-locked; a group takes the smallest slab that is enough.
    """

    def __init__(self, make_stream: Callable[[torch.device], SideStream] = side_stream) -> None:
        self._make_stream = make_stream
        self._device: torch.device | None = None
        self.outward: SideStream
        self.inward: SideStream
        self.slabs: list[Tensor] = []
        self._leaving: list[tuple[_Group, SideWork]] = []

    def begin(self, params: Iterable[Tensor], device: torch.device) -> Offloaded:
        """Return the groups of one forward pass; tensors that share memory with `params` stay where they are."""
        if self._device is None:
            self._device = device
            self.outward, self.inward = self._make_stream(device), self._make_stream(device)
        return Offloaded(self, {param.untyped_storage()._cdata for param in params})

    def take_slab(self, num_bytes: int) -> Tensor:
        """Return host memory of at least `num_bytes`."""
        fitting = [index for index, slab in enumerate(self.slabs) if slab.nbytes >= num_bytes]
        if fitting:
            return self.slabs.pop(min(fitting, key=lambda index: self.slabs[index].nbytes))
        assert self._device is not None, "begin sets the device"
        return host_memory(num_bytes, torch.uint8, self._device)

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start_leaving(self, group: _Group, members: list[weakref.ref[_Saved]]) -> None:
        """Start to copy a group to the host, and free the device's memory of the group that left before."""
        self._leaving.append((group, group.start_to_host(members)))
        while len(self._leaving) > 1:
            left, work = self._leaving.pop(0)
            work.hold_compute()
            left.free()


class Offloaded:
    """Groups of one forward pass through a stage."""

    def __init__(self, offload: ActivationOffload, staying: set[int]) -> None:
        self._offload, self._staying = offload, staying
        self._last: _Group | None = None

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Offload what is saved for backward in the body."""
        group = _Group(self._offload, self._last)
        open_members: dict[int, _Saved] = {}

        def pack(x: Tensor) -> Tensor | _View:
            if x.untyped_storage()._cdata in self._staying or not x.numel():
                return x
            x = x.detach()
            if x.untyped_storage().nbytes() > 2 * x.nbytes:  # a small view of something large
                x = x.clone()
            storage = x.untyped_storage()
            saved = open_members.get(storage._cdata)
            if saved is None:
                saved = open_members[storage._cdata] = _Saved(_bytes_of(x), group)
            return _View(saved, x.dtype, int(x.storage_offset()), x.size(), x.stride())

        with saved_tensors_hooks(pack, _unpack):
            yield
        members = [weakref.ref(saved) for saved in open_members.values()]
        open_members.clear()  # memory that autograd did not keep is freed
        if members:
            self._last = group
            self._offload.start_leaving(group, members)


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    saved, dtype, offset, size, stride = packed
    saved.group.use()
    assert saved.here is not None, "a group in use has all memory on the device"
    empty = torch.empty(0, dtype=dtype, device=saved.here.device)
    return empty.set_(saved.here.untyped_storage(), offset, size, stride)


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))
