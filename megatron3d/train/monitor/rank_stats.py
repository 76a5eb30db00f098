"""Statistics over all ranks, collected by one all-gather: phase times, memory, skipped records."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.hardware.peaks import device_name
from megatron3d.metrics.memory import memory_bytes
from megatron3d.metrics.timers import PHASES, Spread, spread
from megatron3d.parallel.exposed_comm import ExposedComm

Table = Mapping[str, Spread]
TIMERS, MEMORY = "timers", "memory"


class RankStatistics:
    """Collector of each rank's numbers on rank 0; every rank has the same list of labels.

    Args:
        num_lanes: lanes of a streamed dataset whose bad records are skipped; 0 without one.

    Attributes:
        devices: host and device of each rank, on rank 0; empty elsewhere.
    """

    def __init__(self, comm: ProcessComm, device: torch.device, num_lanes: int = 0) -> None:
        self._comm, self._device = comm, device
        self._lanes = tuple(f"skipped records of lane {lane}" for lane in range(num_lanes))
        self._timers = (*PHASES, *map(ExposedComm, comm.axis_sets))
        self._memory = tuple(memory_bytes(device))
        self.devices: Sequence[str] = comm.gather_object(f"host {socket.gethostname()}, {device_name(device)}") or ()

    def gather(self, times_ms: Mapping[str, float], skipped_records: Sequence[int] = ()) -> list[dict[str, float]]:
        """Return times, bytes and skipped records by lane of every rank, in rank order, on rank 0; empty elsewhere."""
        labels = *self._timers, *self._memory, *self._lanes
        mine = {**times_ms, **memory_bytes(self._device), **dict(zip(self._lanes, skipped_records, strict=True))}
        assert mine.keys() <= set(labels), f"{mine.keys() - set(labels)} are no labels of the other ranks"
        row = torch.tensor([[mine.get(label, 0.0) for label in labels]], dtype=torch.float64, device=self._device)
        rows = self._comm.all_gather(row, self._comm.mesh.names, dim=0).wait()
        if self._comm.mesh.rank > 0:
            return []
        return [dict(zip(labels, values, strict=True)) for values in rows.tolist()]

    def skipped_records(self, ranks: Sequence[Mapping[str, float]]) -> int | None:
        """Return the skipped records of all lanes, each as counted by the ranks that read it; None without lanes."""
        return sum(int(max(each[lane] for each in ranks)) for lane in self._lanes) if self._lanes else None

    def tables(self, ranks: Sequence[Mapping[str, float]]) -> dict[str, Table]:
        """Return the spread over ranks of the milliseconds of each phase that took any, and of the bytes."""
        wanted = {TIMERS: self._timers, MEMORY: self._memory}
        return {
            name: {
                label: over_ranks for label in labels if (over_ranks := spread([each[label] for each in ranks])).max > 0
            }
            for name, labels in wanted.items()
        }
