"""Ranks as threads of one process that take turns, with collectives in shared memory.

One rank runs at a time, until it waits for something that has not happened.  A result exists only once it is waited
for: until then its memory holds NaN, nobody may write it, and the input must stay as it is (in_flight.py).  So a
missing wait, memory that is written, freed or resized too early, ranks that call different collectives, and a deadlock
are found always, and not only when the timing is unlucky.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron3d.comm import matmul_rounds
from megatron3d.comm.interface import Comm, Counts, GatheredProduct, Pending, PutProduct, completed
from megatron3d.comm.process_comm import ProcessComm, all_gather_by_parts, all_reduce_by_parts
from megatron3d.config.run_spec import RunSpec
from megatron3d.parallel.mesh import Axes, Link, Mesh, disjoint_cover
from tests.support.in_flight import InFlight
from tests.support.turns import Turns

T = TypeVar("T")
_here = threading.local()


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


class TurnPending(Pending):
    """Collective in flight.

    Attributes:
        memory: where `wait` writes the result; what a rank reads that forgets to wait.
    """

    def __init__(self, finish: Callable[[], Tensor], memory: Tensor) -> None:
        super().__init__(finish, lambda: False)  # nothing is done before it is waited for
        self.memory = memory


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
        result: Callable[[list[Any]], Tensor],
        memory: InFlight,
        out: Tensor,
    ) -> TurnPending:
        """Return a `Pending` of `result` of the values of `ranks`, which the wait writes to `out`."""

        def finish() -> Tensor:
            found = result(self._values(meeting, ranks))
            memory.check()
            with torch.no_grad():
                return out if found is out else out.copy_(found)

        return TurnPending(finish, out)

    def _collective(
        self,
        what: str,
        axes: Axes,
        x: Tensor,
        result: Callable[[list[Tensor]], Tensor],
        out: Tensor,
        writes: list[Tensor] | None = None,
    ) -> TurnPending:
        """Start a collective of all ranks' `x`; of `out`, all but `writes` must stay as it is. `x` may be `out`."""
        live = self.mesh.nontrivial(self.mesh.in_order(axes))
        assert live in self._groups, f"no group was made for {live}; there are {self._groups}"
        ranks, what = self.mesh.ranks(axes), f"{what} {tuple(x.shape)} {x.dtype}"
        meeting = self._exchange(ranks, what, x.detach().clone())
        memory = InFlight(what, [] if x is out else [x], [out] if writes is None else writes)
        return self._pending(meeting, ranks, result, memory, out)

    def _parts(self, axes: Axes) -> tuple[Axes, ...]:
        """Return the groups that make up all ranks, where `axes` are all and have no group, as on GPUs; else ()."""
        live, everything = self.mesh.nontrivial(self.mesh.in_order(axes)), self.mesh.nontrivial(self.mesh.names)
        return disjoint_cover(live, self._groups) if live == everything and live not in self._groups else ()

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(x)
        if (parts := self._parts(axes)) and dim == 0:
            return all_gather_by_parts(self, x, parts)
        shape = [size * ranks if place == dim else size for place, size in enumerate(x.shape)]
        return self._collective("all_gather", axes, x, lambda shards: torch.cat(shards, dim), x.new_empty(shape))

    def all_gather_into(self, whole: Tensor, axes: Axes) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(whole)
        parts = list(whole.chunk(ranks))
        mine = parts.pop(self.mesh.index(axes))
        return self._collective("all_gather", axes, mine, torch.cat, whole, parts)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Pending:
        ranks = self.mesh.size(axes)
        if ranks == 1:
            return completed(x)
        assert x.shape[dim] % ranks == 0, f"{tuple(x.shape)} along {dim} does not divide by {axes}={ranks} ranks"
        mine = self.mesh.index(axes)
        return self._collective(
            "reduce_scatter",
            axes,
            x,
            lambda parts: _sum([part.chunk(ranks, dim)[mine] for part in parts]),
            torch.empty_like(x.chunk(ranks, dim)[mine], memory_format=torch.contiguous_format),
        )

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum") -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        if parts := self._parts(axes):
            return all_reduce_by_parts(self, x, parts, op)
        x = x.contiguous()
        return self._collective(f"all_reduce {op}", axes, x, {"sum": _sum, "max": _max}[op], x)

    def all_to_all(self, x: Tensor, axes: Axes) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        mine = self.mesh.index(axes)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._collective("all_to_all", axes, x, lambda blocks: torch.stack([each[mine] for each in blocks]), out)

    def all_to_all_rows(self, x: Tensor, sent: Counts, received: Counts, axes: Axes) -> Pending:
        if self.mesh.size(axes) == 1:
            return completed(x)
        live, ranks, mine = self.mesh.nontrivial(axes), self.mesh.ranks(axes), self.mesh.index(axes)
        assert live in self._groups, f"no group was made for {live}; there are {self._groups}"
        assert sum(sent) == len(x), f"{len(x)} rows, of which {list(sent)} are sent"
        what, out = f"all_to_all of rows {tuple(x.shape[1:])} {x.dtype}", x.new_empty((sum(received), *x.shape[1:]))
        meeting = self._exchange(ranks, what, (x.detach().clone(), list(sent)))

        def rows(values: list[tuple[Tensor, list[int]]]) -> Tensor:
            blocks = [each.split(counts)[mine] for each, counts in values]
            assert [len(block) for block in blocks] == list(received), f"rank {mine} does not receive {received} rows"
            return torch.cat(blocks)

        return self._pending(meeting, ranks, rows, InFlight(what, [x], [out]), out)

    def shift(self, x: Tensor, out: Tensor, axes: Axes, by: int) -> Pending:
        live, ranks = self.mesh.nontrivial(self.mesh.in_order(axes)), self.mesh.ranks(axes)
        assert live in self._groups, f"no group was made for {live}; there are {self._groups}"
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        source = ranks[(self.mesh.index(axes) - by) % len(ranks)]
        meeting = self._exchange(ranks, f"shift by {by} {tuple(x.shape)} {x.dtype}", x.detach().clone())
        memory = InFlight(meeting.what, [x], [out])
        return self._pending(meeting, (source,), lambda sent: sent[0], memory, out)

    def all_gather_matmul(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, put: PutProduct) -> GatheredProduct:
        return matmul_rounds.all_gather_matmul(self, a_MK, b_NK, axes, put)

    def matmul_reduce_scatter(self, a_MK: Tensor, b_NK: Tensor, axes: Axes, dim: int, put: PutProduct) -> Pending:
        return matmul_rounds.matmul_reduce_scatter(self, a_MK, b_NK, axes, dim, put)

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
        return self._pending(meeting, (sender,), lambda _: x, InFlight(meeting.what, [x], []), x)

    def receive(self, out: Tensor, link: Link) -> Pending:
        assert out.is_contiguous(), f"a tensor of strides {out.stride()} cannot be received into"
        (sender,) = {*self._pair(link)} - {self.mesh.rank}
        meeting = self._transfer(link, sender, None, out)
        return self._pending(meeting, (sender,), lambda sent: sent[0], InFlight(meeting.what, [], [out]), out)

    def all_reduce_pair(self, x: Tensor, link: Link) -> Pending:
        pair = self._pair(link)
        meeting = self._exchange(pair, f"all_reduce_pair {tuple(x.shape)} {x.dtype}", x.detach().clone())
        return self._pending(meeting, pair, _sum, InFlight(meeting.what, [], [x]), x)

    def _objects(self, what: str, value: Any) -> list[Any]:
        everyone = tuple(range(self.mesh.world_size))
        return self._values(self._exchange(everyone, what, value), everyone)

    def all_to_all_bytes(self, blocks: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
        sent = self._objects("all_to_all_bytes", [block.clone() for block in blocks])
        return [each[self.mesh.rank] for each in sent]

    def gather_object(self, value: Any) -> list[Any] | None:
        values = self._objects("gather_object", value)
        return values if self.mesh.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self._objects("broadcast_object", value)[0]

    def barrier(self) -> None:
        self._objects("barrier", None)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _max(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)
