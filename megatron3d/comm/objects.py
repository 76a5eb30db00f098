"""Object collectives, over a process group or in a tree over the rendezvous store; errors that all ranks raise.

    rank 0  <-  1 ... 32  <-  33 ... 1056  <-  ...        gather: every rank adds its children's values to its own
    rank 0  ->  1 ... 32  ->  33 ... 1056  ->  ...        broadcast: every rank passes the value on to its children

A group of all ranks would connect every rank with every other (gloo) or give each GPU one more communicator, and rank
0's a buffer of world size times the largest value (NCCL).  The tree has one connection per rank, to the store.

Values travel as JSON: whoever reaches the store's port can write to it, and unpickling runs what was written.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron3d.comm.interface import Comm, ObjectCollectives
from megatron3d.errors import RunFailed, UserError, is_machine_fault
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime.waits import wait_for_collective

FAN_IN = 32
# The store refuses values of more than 8 MiB.
CHUNK_BYTES = 4 * 2**20
_HEADER_BYTES = 8
_PATH = "__path__"


def encode(value: Any) -> bytes:
    """Return a value of numbers, texts, paths, lists and dictionaries with texts as keys, in JSON.

    Tuples become lists.  Raises TypeError for anything else.
    """
    _require_text_keys(value)
    return json.dumps(value, default=_encode_other, separators=(",", ":")).encode()


def _require_text_keys(value: Any) -> None:
    """Raise TypeError for other keys, which would come back as texts; lists may be long, and are not looked through."""
    for key, each in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"the keys of {value!r:.100} are no texts")
        _require_text_keys(each)


def _encode_other(value: Any) -> Any:
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, Integral):  # as numpy's
        return int(value)
    raise TypeError(f"{type(value).__name__} {value!r:.100} has no JSON")


def decode(content: bytes) -> Any:
    """Return the value that was encoded; raises ValueError where the content is not JSON."""
    return json.loads(content, object_hook=lambda each: Path(each[_PATH]) if each.keys() == {_PATH} else each)


class ByteStore(Protocol):
    """Bytes by key, shared by all ranks; torch's stores are such."""

    def set(self, key: str, value: Any) -> None:
        """Store a value under a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there; raises RuntimeError after the store's timeout."""

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""


class GroupObjects:
    """Object collectives over the process group of the rendezvous, which is that of all ranks on CPUs."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def gather_object(self, value: Any) -> list[Any] | None:
        if self.mesh.world_size == 1:
            return [value]
        content = _as_tensor(encode(value))
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.mesh.world_size)]
        wait_for_collective(dist.all_gather(sizes, torch.tensor([len(content)]), async_op=True))
        longest = max(map(int, sizes))
        padded = torch.cat((content, content.new_zeros(longest - len(content))))
        if self.mesh.rank > 0:
            wait_for_collective(dist.gather(padded, dst=0, async_op=True))
            return None
        parts = [torch.empty_like(padded) for _ in sizes]
        wait_for_collective(dist.gather(padded, parts, dst=0, async_op=True))
        return [decode(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        if self.mesh.world_size == 1:
            return value
        content = _as_tensor(encode(value)) if self.mesh.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)])
        wait_for_collective(dist.broadcast(size, src=0, async_op=True))
        content = content if self.mesh.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        wait_for_collective(dist.broadcast(content, src=0, async_op=True))
        return value if self.mesh.rank == 0 else decode(content.numpy().tobytes())


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class StoreObjects:
    """Object collectives in a tree over a store, from which every value is removed by the rank that reads it.

    Of r ranks, each sends one value per gather and reads those of its children, at most `fan_in`; in a broadcast it
    reads one and sends one to each child.  A rank waits for at most log(r) / log(fan_in) + 1 ranks in a row.
    """

    def __init__(self, mesh: Mesh, store: ByteStore, fan_in: int = FAN_IN) -> None:
        self.mesh, self._store = mesh, store
        first = fan_in * mesh.rank + 1
        self._children = range(min(first, mesh.world_size), min(first + fan_in, mesh.world_size))
        self._num_calls = 0

    def gather_object(self, value: Any) -> list[Any] | None:
        call = self._next_call()
        values = {str(self.mesh.rank): encode(value).decode()}
        for child in self._children:
            values |= decode(self._take(f"{call}/{child}"))
        if self.mesh.rank > 0:
            self._put(f"{call}/{self.mesh.rank}", encode(values))
            return None
        return [decode(values[str(rank)].encode()) for rank in range(self.mesh.world_size)]

    def broadcast_object(self, value: Any) -> Any:
        call = self._next_call()
        content = encode(value) if self.mesh.rank == 0 else self._take(f"{call}/{self.mesh.rank}")
        for child in self._children:
            self._put(f"{call}/{child}", content)
        return value if self.mesh.rank == 0 else decode(content)

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _put(self, key: str, content: bytes) -> None:
        """Store chunks, the first one last and with their number, so that all are there once it is."""
        chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{key}/{index}", chunk)
        self._store.set(key, len(chunks).to_bytes(_HEADER_BYTES, "little") + chunks[0])

    def _take(self, key: str) -> bytes:
        first = self._store.get(key)
        count = int.from_bytes(first[:_HEADER_BYTES], "little")
        keys = [key, *(f"{key}/{index}" for index in range(1, count))]
        content = b"".join([first[_HEADER_BYTES:], *map(self._store.get, keys[1:])])
        for each in keys:
            self._store.delete_key(each)
        return content


def store_objects(mesh: Mesh, timeout: timedelta | None = None) -> ObjectCollectives:
    """Return object collectives over a connection of their own to the rendezvous store.

    All ranks must call this at the same place.  A rank that waits blocks its connection, so that threads, and torch's
    own use of the store, need others.  A wait that takes longer than `timeout` raises RuntimeError.
    """
    if mesh.world_size == 1:
        return GroupObjects(mesh)
    shared = dist.distributed_c10d._get_default_store()
    call = shared.add(f"object collectives of rank {mesh.rank}", 1)
    store: Any = dist.PrefixStore(f"object collectives {call}", shared.clone())  # type: ignore[attr-defined]
    if timeout is not None:
        store.set_timeout(timeout)
    return StoreObjects(mesh, store)


def background_comm(mesh: Mesh) -> ObjectCollectives:
    """Return object collectives for slow work, also in a thread; a wait of a day raises RuntimeError.

    All ranks must call this at the same place.  It is the watchdog that ends a wait for a rank without progress.
    """
    return store_objects(mesh, timedelta(days=1))


T = TypeVar("T")
# Number, reason and file of an OSError.
Fault = tuple[int, str, str | None]


def run_on_all_ranks(comm: ObjectCollectives, action: Callable[[], T]) -> list[T] | None:
    """Run `action` on every rank; return the results in rank order on rank 0, None elsewhere.

    Returns when all ranks are done.  Raises UserError with the distinct problems of all ranks (an OSError is one), the
    OSError of a rank's machine, or RuntimeError naming the ranks where another exception occurred, on the other ranks
    as a RunFailed, without a traceback.  The action must not communicate.
    """
    result: T | None = None
    problems: tuple[str, ...] = ()
    crash: Exception | None = None
    fault: Fault | None = None
    try:
        result = action()
    except UserError as error:
        problems = error.problems
    except OSError as error:
        if is_machine_fault(error):
            fault = error.errno or errno.EIO, error.strerror or str(error), error.filename
        else:
            problems = UserError.of(error).problems
    except Exception as error:
        crash = error
    crashed = f"rank {comm.mesh.rank}: {crash!r}" if crash else None
    gathered = comm.gather_object((result, problems, crashed, fault))
    failures = (
        list(dict.fromkeys(problem for _, found, *_ in gathered or () for problem in found)),
        [crashed for _, _, crashed, _ in gathered or () if crashed],
        [fault for *_, fault in gathered or () if fault],
    )
    all_problems, all_crashes, all_faults = comm.broadcast_object(failures)
    if all_crashes:
        if crash is None:  # where it is from is said on the rank that crashed
            raise RunFailed("; ".join(all_crashes))
        raise RuntimeError("; ".join(all_crashes)) from crash
    if all_faults:  # perhaps the cause of the others' problems
        raise OSError(*all_faults[0])
    UserError.collect(all_problems)
    return None if gathered is None else [result for result, *_ in gathered]


def on_rank_0(comm: ObjectCollectives, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank; errors as `run_on_all_ranks`."""
    results: list[T] = []
    run_on_all_ranks(comm, lambda: results.append(action()) if comm.mesh.rank == 0 else None)
    result: T = comm.broadcast_object(results[0] if results else None)
    return result


def broadcast_bytes(comm: Comm, content: bytes, device: torch.device) -> bytes:
    """Return rank 0's bytes on every rank, sent by the collectives of tensors on `device`, however many they are.

    Every rank sends and receives about twice their number per part of the mesh that has a group; rank 0 no more.
    """
    if comm.mesh.world_size == 1:
        return content
    size: int = comm.broadcast_object(len(content))
    words = torch.zeros(-(-size // 4), dtype=torch.int32)
    if comm.mesh.rank == 0:
        words.view(torch.uint8)[:size] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    total = comm.all_reduce(words.to(device), comm.mesh.names).wait()  # of one rank's words and zeros
    return total.cpu().view(torch.uint8)[:size].numpy().tobytes()
