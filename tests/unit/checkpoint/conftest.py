"""Ranks as threads of one process, sufficient for object collectives, and a checkpoint that two ranks saved."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from megatron3d.checkpoint.store import Piece, save
from megatron3d.parallel.mesh import Mesh


class ThreadComm:
    """Object collectives of `Comm` between threads; a rank that does not take part breaks the barrier."""

    def __init__(self, mesh: Mesh, slots: list[Any], meeting: Barrier) -> None:
        self.mesh, self._slots, self._meeting = mesh, slots, meeting

    def _exchange(self, value: Any) -> list[Any]:
        self._slots[self.mesh.rank] = value
        self._meeting.wait(timeout=20)
        values = list(self._slots)
        self._meeting.wait(timeout=20)
        return values

    def barrier(self) -> None:
        self._exchange(None)

    def gather_object(self, value: Any) -> list[Any] | None:
        values = self._exchange(value)
        return values if self.mesh.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self._exchange(value)[0]


def _run_ranks(mesh: Mesh, action: Callable[[ThreadComm], Any]) -> list[Any]:
    slots, meeting = [None] * mesh.world_size, Barrier(mesh.world_size)
    comms = [ThreadComm(mesh.at(rank), slots, meeting) for rank in range(mesh.world_size)]

    def outcome(comm: ThreadComm) -> Any:
        try:
            return action(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(mesh.world_size) as threads:
        return list(threads.map(outcome, comms))


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[Mesh, Callable[[ThreadComm], Any]], list[Any]]:
    """Run `action(comm)` on every rank of the mesh; return its result or the exception that it raised, by rank."""
    return _run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save iteration 3 with `w` = [[0, 1], [2, 3], [4, 5]], the first row from rank 0 and the others from rank 1."""
    w = torch.arange(6.0).reshape(3, 2)

    def save_rows(comm: ThreadComm) -> Path:
        low, high = ((0, 1), (1, 3))[comm.mesh.rank]
        return save(tmp_path / "run", 3, [Piece("w", (3, 2), ((low, high), (0, 2)), w[low:high])], {"a": 1}, comm)

    return _run_ranks(Mesh((("x", 2),)), save_rows)[0]
