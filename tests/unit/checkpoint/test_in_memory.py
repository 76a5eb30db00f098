"""Fact: at any moment one step is complete in memory without any one rank, whatever the newest copy has come to.

A copy that another rank sends is a step only when all of it has arrived; the older one stays until all ranks have it.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.checkpoint.async_saver import PieceSource
from megatron3d.checkpoint.held import Held, complete_steps
from megatron3d.checkpoint.in_memory import InMemoryCheckpoints
from megatron3d.checkpoint.pieces import Piece
from megatron3d.errors import RunFailed
from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.peers import kept_by, peer_of
from tests.support.late_stream import LateStream
from tests.support.thread_ranks import ObjectThreadComm, run_on_threads

RANKS, ROWS, COLUMNS = 3, 6, 4
MESH = Mesh((("data", RANKS),))
HOSTS = "ABC"
SHAPE = {"w": (ROWS, COLUMNS), "n": (RANKS,)}


class QueueLink:
    """A link between threads; `breaks` says in the middle of which tensors its connection breaks."""

    def __init__(self, rank: int, lines: Sequence[queue.Queue[Tensor]], breaks: Callable[[Tensor], bool]) -> None:
        self._mine, self._theirs = lines[peer_of(rank, HOSTS)], lines[rank]
        self._breaks = breaks

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        for each in sent:
            self._mine.put(each.clone())
        for each in received:
            if self._breaks(each):
                each[: len(each) // 2] = self._theirs.get(timeout=20)[: len(each) // 2]
                raise RuntimeError("Connection closed by peer")
            each.copy_(self._theirs.get(timeout=20))


def source_of(rank: int, value: float) -> PieceSource:
    """Return two rows of `w`, in part and with padding between them, and an element of `n` in another dtype."""

    def source(copy: Callable[[Tensor], Tensor]) -> list[Piece]:
        rows = copy(torch.arange(3.0 * COLUMNS).view(3, COLUMNS) + 100 * rank + 1000 * value)
        low = 2 * rank
        return [
            Piece("w", SHAPE["w"], ((low, low + 1), (0, COLUMNS)), rows[:1]),
            Piece("w", SHAPE["w"], ((low + 1, low + 2), (0, COLUMNS)), rows[2:]),
            Piece("n", SHAPE["n"], ((rank, rank + 1),), copy(torch.tensor([value + rank], dtype=torch.bfloat16))),
        ]

    return source


def meta(step: int, rank: int) -> dict[str, Any]:
    return {"iteration": step, "consumed_samples": 8 * step, "cursors": {str(rank): [step]}}


Action = Callable[[ObjectThreadComm, InMemoryCheckpoints], Any]


def on_ranks(action: Action, breaks: Callable[[Tensor], bool] = lambda received: False) -> list[Any]:
    """Return the results of ranks in threads, each with its in-memory checkpoints."""
    lines: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(RANKS)]
    # The background threads have an object communicator of their own.
    meeting, slots = threading.Barrier(RANKS), [None] * RANKS

    def rank_of(comm: ObjectThreadComm) -> Any:
        rank = comm.mesh.rank
        aside = ObjectThreadComm(comm.mesh, slots, meeting)
        link = QueueLink(rank, lines, breaks)
        checkpoints = InMemoryCheckpoints(aside, link, torch.device("cpu"))
        checkpoints.prepare(source_of(rank, 0.0))
        try:
            return action(comm, checkpoints)
        finally:
            meeting.abort()

    results = run_on_threads(MESH, rank_of)
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def take(comm: ObjectThreadComm, checkpoints: InMemoryCheckpoints, step: int) -> None:
    rank = comm.mesh.rank
    checkpoints.take(meta(step, rank), source_of(rank, float(step)))


def complete(held: Sequence[Held]) -> list[int]:
    return [index.iteration for index in complete_steps([[step.listing() for step in each] for each in held], SHAPE)]


def assert_values(held: Held, rank: int) -> None:
    """Check that what a rank holds are its own boxes, and those of the rank that it keeps a copy of."""
    for step in held:
        (owner,) = map(int, step.meta["cursors"])
        assert owner in (rank, kept_by(rank, HOSTS))
        expected = source_of(owner, float(step.meta["iteration"]))(lambda x: x)
        for piece, wanted in zip(step.pieces, expected, strict=True):
            assert (piece.name, piece.shape, piece.box) == (wanted.name, wanted.shape, wanted.box)
            assert piece.tensor.equal(wanted.tensor) and piece.tensor.dtype == wanted.tensor.dtype


def test_two_steps_are_held_of_two_ranks_and_any_rank_may_be_lost() -> None:
    def run(comm: ObjectThreadComm, checkpoints: InMemoryCheckpoints) -> Held:
        assert checkpoints.held() == []
        for step in (2, 4, 6):
            take(comm, checkpoints, step)
            checkpoints.wait()
        assert_values(checkpoints.held(), comm.mesh.rank)
        comm.barrier()
        return checkpoints.held()

    held = on_ranks(run)
    assert [[step.meta["iteration"] for step in each] for each in held] == [[6, 6, 4, 4]] * RANKS
    for lost in range(RANKS):
        assert complete([each for rank, each in enumerate(held) if rank != lost]) == [6, 4]
    assert complete(held[:1]) == []


def test_a_copy_that_has_not_arrived_is_no_step_and_the_older_one_is_complete() -> None:
    """A connection breaks in the middle of a copy, as when a node is lost: half of it has been overwritten."""
    lost = threading.Event()

    def run(comm: ObjectThreadComm, checkpoints: InMemoryCheckpoints) -> Held:
        for step in (2, 4):
            take(comm, checkpoints, step)
            checkpoints.wait()
        comm.barrier()
        lost.set()
        take(comm, checkpoints, 6)
        with pytest.raises(RunFailed, match=r"in-memory checkpoint: Connection closed by peer"):
            checkpoints.wait()
        assert_values(checkpoints.held(), comm.mesh.rank)
        comm.barrier()
        return checkpoints.held()

    held = on_ranks(run, lambda received: lost.is_set() and received.dtype == torch.float32)
    for each in held:
        assert sorted(step.meta["iteration"] for step in each) == [4, 4, 6], "its own boxes of 6, and both of 4"
    assert complete(held) == [6, 4]
    for rank in range(RANKS):
        assert complete([each for other, each in enumerate(held) if other != rank]) == [4]


def test_the_state_is_copied_before_it_changes() -> None:
    """The stream copies as late as it may: what is held is the state at the time of the call."""
    values = torch.ones(4)

    def source(copy: Callable[[Tensor], Tensor]) -> list[Piece]:
        return [Piece("w", (4,), ((0, 4),), copy(values))]

    class Alone:
        def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
            for a, b in zip(sent, received, strict=True):
                b.copy_(a)

    comm = ObjectThreadComm(Mesh((("data", 1),)), [None], threading.Barrier(1))
    checkpoints = InMemoryCheckpoints(comm, Alone(), torch.device("cpu"))
    for snapshot in checkpoints._snapshots:
        snapshot._stream = LateStream()
    checkpoints.prepare(source)
    checkpoints.take(meta(1, 0), source)
    checkpoints.hold_update()
    values.fill_(2)
    checkpoints.wait()
    mine, theirs = checkpoints.held()
    assert mine.pieces[0].tensor.tolist() == theirs.pieces[0].tensor.tolist() == [1.0] * 4
    assert theirs.pieces[0].tensor.data_ptr() != mine.pieces[0].tensor.data_ptr()


def test_memory_and_bytes_are_those_of_the_copies() -> None:
    """Two copies of each, allocated once; each time a rank sends its flat buffers, and metadata in two messages."""

    def run(comm: ObjectThreadComm, checkpoints: InMemoryCheckpoints) -> None:
        flat = 3 * COLUMNS * 4 + 2
        assert checkpoints.num_bytes == 2 * flat + 2 * flat
        assert checkpoints.sent_bytes == 0
        places = []
        for step in (1, 2, 3, 4):
            take(comm, checkpoints, step)
            checkpoints.wait()
            places.append({piece.tensor.data_ptr() for held in checkpoints.held() for piece in held.pieces})
        said = sum(8 + len(json.dumps(meta(step, comm.mesh.rank))) for step in (1, 2, 3, 4))
        assert checkpoints.sent_bytes == 4 * flat + said
        assert places[1] == places[2] == places[3] and checkpoints.num_bytes == 4 * flat
        comm.barrier()

    on_ranks(run)


def test_a_rollback_forgets_later_steps() -> None:
    def run(comm: ObjectThreadComm, checkpoints: InMemoryCheckpoints) -> None:
        take(comm, checkpoints, 3)
        checkpoints.forget()
        assert checkpoints.held() == []
        take(comm, checkpoints, 1)
        checkpoints.wait()
        assert [step.meta["iteration"] for step in checkpoints.held()] == [1, 1]
        comm.barrier()

    on_ranks(run)
