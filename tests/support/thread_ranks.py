"""Ranks as threads of one process, sufficient for object collectives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from megatron3d.parallel.mesh import Mesh


class ObjectThreadComm:
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


def run_on_threads(mesh: Mesh, action: Callable[[ObjectThreadComm], Any]) -> list[Any]:
    """Run `action(comm)` on every rank of the mesh; return its result or the exception that it raised, by rank."""
    slots, meeting = [None] * mesh.world_size, Barrier(mesh.world_size)
    comms = [ObjectThreadComm(mesh.at(rank), slots, meeting) for rank in range(mesh.world_size)]

    def outcome(comm: ObjectThreadComm) -> Any:
        try:
            return action(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(mesh.world_size) as threads:
        return list(threads.map(outcome, comms))
