"""Ranks as threads of one process that take turns, with collectives in shared memory.

One rank runs at a time, until it waits for something that has not happened.  A result exists only once it is waited
for: until then its memory holds NaN, and the input must stay as it is.  So a missing wait, an input that changes too
early, ranks that call different collectives, and a deadlock are found always, and not only when the timing is unlucky.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.p2p import Link

T = TypeVar("T")
_here = threading.local()


class Abandoned(Exception):
    """Raised in ranks that wait when another rank has failed."""


class _Wait(NamedTuple):
    what: str
    is_over: Callable[[], bool]


class Turns:
    """Passes the turn from rank to rank; a rank that waits gives it to the next one that can go on."""

    def __init__(self, num_ranks: int) -> None:
        self._wakes = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits = {rank: _Wait("start", lambda: True) for rank in range(num_ranks)}
        self.failure: BaseException | None = None

    def start(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._wakes[rank].acquire()

    def wait(self, rank: int, what: str, is_over: Callable[[], bool]) -> None:
        """Return once `is_over()`, which another rank brings about.

        Raises Abandoned where that cannot happen any more.
        """
        if is_over():
            return
        self._waits[rank] = _Wait(what, is_over)
        self.give(rank)
        self._wakes[rank].acquire()
        if self.failure:
            raise Abandoned(what)

    def give(self, rank: int) -> None:
        """Give the turn to the next rank after `rank` that can go on; where all wait, all fail."""
        num_ranks = len(self._wakes)
        for other in ((rank + 1 + step) % num_ranks for step in range(num_ranks)):
            if other in self._waits and self._waits[other].is_over():
                del self._waits[other]
                self._wakes[other].release()
                return
        if self._waits:
            waits = "; ".join(f"rank {rank} waits for {wait.what}" for rank, wait in sorted(self._waits.items()))
            self.fail(AssertionError(f"deadlock: {waits}"))

    def fail(self, error: BaseException) -> None:
        """End all ranks that wait."""
        self.failure = self.failure or error
        waits, self._waits = self._waits, {}
        for rank in waits:
            self._wakes[rank].release()


@dataclass
class _Meeting:
    """One collective: what the ranks of a group have brought so far."""

    what: str
    size: int
    values: dict[int, Any] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return len(self.values) == self.size


class TurnRanks:
    """A world of ranks in threads: `run(fn, *args)` returns `fn(rank, world_size, *args)` of every rank in order."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.turns = Turns(num_ranks)
        self._meetings: dict[tuple[Any, int], _Meeting] = {}
        self._counts: Counter[tuple[Any, int]] = Counter()

    def comm(self, mesh: Mesh, axis_sets: Iterable[Axes], links: Iterable[Link] = ()) -> TurnComm:
        """Return the communicator of a rank, like `ProcessComm`."""
        groups = dict.fromkeys(mesh.nontrivial(mesh.in_order(axes)) for axes in axis_sets)
        return TurnComm(mesh, self, list(groups), sorted(links))

    def meet(self, rank: int, group: Any, size: int, what: str, value: Any) -> _Meeting:
        """Bring `value` to the next collective of a group, which `what` must describe alike on all its ranks."""
        turn = self._counts[group, rank]
        self._counts[group, rank] += 1
        meeting = self._meetings.setdefault((group, turn), _Meeting(what, size))
        assert meeting.what == what, f"rank {rank} calls {what} where other ranks of {group} call {meeting.what}"
        meeting.values[rank] = value
        if meeting.is_complete():
            del self._meetings[group, turn]
        return meeting

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run a function on every rank.  Raises the error of the first rank that failed."""
        results: dict[int, T] = {}

        def as_rank(rank: int) -> None:
            torch.set_num_threads(1)
            _here.world = self
            self.turns.start(rank)
            try:
                if not self.turns.failure:
                    results[rank] = fn(rank, self.num_ranks, *args)
                self.turns.give(rank)
            except BaseException as error:
                self.turns.fail(error)

        threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        self.turns.give(self.num_ranks - 1)
        for thread in threads:
            thread.join()
        if self.turns.failure:
            raise self.turns.failure
        assert not self._meetings, f"ranks did not all take part in: {list(self._meetings.values())}"
        return [results[rank] for rank in range(self.num_ranks)]


def run_turns(fn: Callable[..., T], num_ranks: int, *args: Any) -> list[T]:
    """Return `fn(rank, num_ranks, *args)` of every rank in order, like `Pool.run` on processes."""
    return TurnRanks(num_ranks).run(fn, *args)


def make_comm(mesh: Mesh, axis_sets: Iterable[Axes], links: Iterable[Link] = ()) -> Comm:
    """Return the communicator of the rank that runs here: a thread of `run_turns`, or this process."""
    world: TurnRanks | None = getattr(_here, "world", None)
    return world.comm(mesh, axis_sets, links) if world else ProcessComm(mesh, axis_sets, links)


def connect(spec: RunSpec) -> Comm:
    """Return the communicator of a run on the rank that runs here."""
    state = spec.parallel_state
    return make_comm(state.mesh, state.group_axes, state.links)


class TurnComm:
    """`Comm` of one rank of a `TurnRanks`."""

    def __init__(self, mesh: Mesh, world: TurnRanks, groups: list[Axes], links: list[Link]) -> None:
        self.mesh, self._world, self._groups, self._links = mesh, world, groups, links

    def _exchange(self, ranks: tuple[int, ...], what: str, value: Any) -> _Meeting:
        """Bring a value to the next collective of `ranks`."""
        return self._world.meet(self.mesh.rank, tuple(sorted(ranks)), len(ranks), what, value)

    def _values(self, meeting: _Meeting, ranks: tuple[int, ...]) -> list[Any]:
        """Wait for a collective; return the values of `ranks`, in order."""
        self._world.turns.wait(self.mesh.rank, f"{meeting.what} of ranks {ranks}", meeting.is_complete)
        return [meeting.values[rank] for rank in ranks]

    def _pending(
        self,
        meeting: _Meeting,
        ranks: tuple[int, ...],
        x: Tensor,
        result: Callable[[list[Any]], Tensor],
        into: Tensor | None = None,
    ) -> Pending:
        """Return a `Pending` of `result` of the values of `ranks`, written to `into` where given.

        Until it is waited for, `x` must not change, unless it is `into`.
        """
        kept = None if into is x else x.detach().clone()

        def finish() -> Tensor:
            found = result(self._values(meeting, ranks))
            assert kept is None or _same(kept, x), f"the input of {meeting.what} changed before the wait"
            if into is None:
                return found
            with torch.no_grad():
                return into.copy_(found)

        return Pending(finish, meeting.is_complete)

    def _collective(
        self, what: str, axes: Axes, x: Tensor, result: Callable[[list[Tensor]], Tensor], into: Tensor | None = None
    ) -> Pending:
        """Return a `Pending` of `result` of all ranks' `x`, written to `into` where given."""
        live = self.mesh.nontrivial(self.mesh.in_order(axes))
        assert live in self._groups, f"no group was made for {live}; there are {self._groups}"
        ranks = self.mesh.ranks(axes)
        meeting = self._exchange(ranks, f"{what} {tuple(x.shape)} {x.dtype}", x.detach().clone())
        return self._pending(meeting, ranks, x, result, into)

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        return self._collective("all_gather", axes, x, lambda shards: torch.cat(shards, dim))

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(whole)
        parts = list(whole.chunk(ranks))
        mine = parts.pop(self.mesh.index(axes))
        _invalidate(*parts)
        return self._collective("all_gather", axes, mine, torch.cat, whole)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(x)
        assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} along {dim} does not divide by {axes}={ranks} ranks"
        mine = self.mesh.index(axes)
        return self._collective(
            "reduce_scatter", axes, x, lambda parts: _sum([part.chunk(ranks, dim)[mine] for part in parts])
        )

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        x = x.contiguous()
        pending = self._collective(f"all_reduce {op}", axes, x, {"sum": _sum, "max": _max}[op], x)
        _invalidate(x)
        return pending

    def _pair(self, link: Link) -> tuple[int, int]:
        assert link in self._links, f"no group was made for {link}; there are {self._links}"
        return link.ranks(self.mesh)

    def _transfer(self, link: Link, sender: int, value: Any, x: Tensor) -> _Meeting:
        """Meet the other end of a link; transfers in different directions do not wait for each other."""
        pair = self._pair(link)
        return self._world.meet(self.mesh.rank, (pair, sender), 2, f"transfer {tuple(x.shape)} {x.dtype}", value)

    def send(self, x: Tensor, link: Link) -> Pending:
        x, sender = x.contiguous(), self.mesh.rank
        meeting = self._transfer(link, sender, x.detach().clone(), x)
        return self._pending(meeting, (sender,), x, lambda _: x)

    def receive(self, out: Tensor, link: Link) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        (sender,) = {*self._pair(link)} - {self.mesh.rank}
        _invalidate(out)
        return self._pending(self._transfer(link, sender, None, out), (sender,), out, lambda sent: sent[0], out)

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        pair = self._pair(link)
        meeting = self._exchange(pair, f"all_reduce_pair {tuple(x.shape)} {x.dtype}", x.detach().clone())
        _invalidate(x)
        return self._pending(meeting, pair, x, _sum, x)

    def _objects(self, what: str, value: Any) -> list[Any]:
        everyone = tuple(range(self.mesh.world_size))
        return self._values(self._exchange(everyone, what, value), everyone)

    def gather_object(self, value: Any) -> list[Any] | None:
        values = self._objects("gather_object", value)
        return values if self.mesh.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self._objects("broadcast_object", value)[0]

    def barrier(self) -> None:
        self._objects("barrier", None)


def _invalidate(*results: Tensor) -> None:
    """Fill memory that holds nothing valid before a wait."""
    with torch.no_grad():
        for x in results:
            x.fill_(torch.nan if x.is_floating_point() else -1)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _max(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)
