"""What backward keeps: activation recomputation (activation checkpointing), and offloading to host memory.

    compute   | F layer 0 | F layer 1      | F layer 2      | ...  | B layer 2      | B layer 1      | B layer 0
    out                   | 0 to the host  | 1 to the host  | 2
    in                                                         2   | 1 to the device | 0 to the device

Copies run on side streams from and to page-locked host memory; on a CPU a copy is complete when it returns.  A group is
what one layer saves, or one run of recomputed layers.  The device holds two at a time: in forward the one that is
computed and the one that leaves; in backward the one that is used and the one before it, which is fetched meanwhile.
The last group is used first and is still on the device if its backward follows at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class KeptResults:
    """What forward has found and recomputation must not find again, such as the choice of experts."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return `find()` in forward, and in the recomputation what it has returned there."""
        found: T = self._found.pop(name) if name in self._found else self._found.setdefault(name, find())
        return found


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args), saving only the arguments for backward and recomputing the rest there.

    No random state is saved, since dropout masks are a function of indices.
    """
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def saved_by_autograd(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Save tensors as autograd does, so that offloading and other hooks apply; return a function that brings them."""
    dummy = torch.empty(0, requires_grad=True)
    node: Any = _SaveOnly.apply(dummy, *(each.detach() for each in tensors)).grad_fn
    return lambda: node.saved_tensors


class _SaveOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return dummy.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is computed of what is only saved")


def recompute_from_input(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> AbstractContextManager[None]:
    """Return a context in which autograd saves x instead of y = function(x), and recomputes y in backward."""
    if not torch.is_grad_enabled():
        return contextlib.nullcontext()
    saved_x = saved_by_autograd(x)

    def compute() -> Tensor:
        with torch.no_grad():
            return function(*saved_x())

    return _saving_instead(_identity(y), lambda: compute)


Brings = Callable[[], Tensor]


def _identity(y: Tensor) -> tuple[int, torch.Size]:
    return y.untyped_storage()._cdata, y.shape


def _saving_instead(y: tuple[int, torch.Size], instead: Callable[[], Brings]) -> AbstractContextManager[None]:
    """Return a context in which autograd saves `instead()`, which brings a tensor, in the place of that tensor y.

    It saves others as it would outside of the context, where they may be offloaded.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(saved: Tensor) -> Tensor | Brings:
        if _identity(saved) == y:
            return instead()
        return saved if outer is None else partial(outer[1], outer[0](saved))

    def unpack(packed: Tensor | Brings) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return hooks


class OutputAgain:
    """Makes autograd save x instead of y = function(x), in the contexts in which it would save y.

    The first one that needs y in backward recomputes it, and the last one frees it.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self._function, self._saved_x = function, saved_by_autograd(x)
        self._identity = _identity(y)
        self._y: Tensor | None = None
        self._num_needed = 0

    def context(self) -> AbstractContextManager[None]:
        """Return a context in which y lives and is not saved."""

        def needed() -> Brings:
            self._num_needed += 1
            return self.again

        return _saving_instead(self._identity, needed)

    def again(self) -> Tensor:
        """Return y."""
        if self._y is None:
            with torch.no_grad():
                self._y = self._function(*self._saved_x())
        y, self._num_needed = self._y, self._num_needed - 1
        if not self._num_needed:
            self._y = None
        return y


# Threads that touch the pages of new memory before it is page-locked, which one core does with 1 to 2 GB/s.
NUM_TOUCHING_THREADS = 4
_REGISTER_FOR_ALL_CONTEXTS = 1


class SideWork:
    """Work on a side stream; this is work that is complete."""

    def hold_compute(self) -> None:
        """Let everything that is computed from now on wait for this work; the host does not wait."""

    def wait(self) -> None:
        """Wait on the host until this work is complete."""


class SideStream:
    """Order of work next to the compute stream, one piece after another; on a CPU work runs at once."""

    def run(self, work: Callable[[], None]) -> SideWork:
        """Start `work`, which only enqueues operations, after everything that is computed so far."""
        work()
        return SideWork()


class DeviceStream(SideStream):
    """Side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device)

    def run(self, work: Callable[[], None]) -> SideWork:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
        return _DeviceWork(self._device, self._stream.record_event())


class _DeviceWork(SideWork):
    def __init__(self, device: torch.device, end: torch.Event) -> None:
        self._device, self._end = device, end

    def hold_compute(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        self._end.synchronize()


def side_stream(device: torch.device) -> SideStream:
    """Return a new side stream of a device."""
    return SideStream() if device.type == "cpu" else DeviceStream(device)


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory [numel] for copies to and from `device`, page-locked if that is an accelerator.

    Nothing is added to its size, whereas torch rounds its pinned memory up to a power of two.  It stays page-locked
    until the process ends, so the caller keeps it.  Raises RuntimeError where the system does not allow as much.
    """
    memory = torch.empty(numel, dtype=dtype)
    if device.type != "cpu" and numel:
        with ThreadPoolExecutor(NUM_TOUCHING_THREADS) as threads:
            list(threads.map(Tensor.zero_, memory.chunk(NUM_TOUCHING_THREADS)))
        torch.accelerator.set_device_index(device)  # each thread has its own, and the first device by default
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_FOR_ALL_CONTEXTS))
        if code:
            size = f"{memory.nbytes / 2**30:.1f} GiB of host memory"
            raise RuntimeError(f"{size} cannot be page-locked (CUDA error {code})")
    return memory


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
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))
