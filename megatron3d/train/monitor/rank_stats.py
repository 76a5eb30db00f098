"""Statistics over all ranks: minimum, maximum, mean, and the rank of the maximum of phase times, memory and records.

They are all-reduced, so that rank 0 handles a few hundred numbers however many ranks there are.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.hardware.peaks import device_name
from megatron3d.metrics.memory import memory_bytes
from megatron3d.metrics.timers import PHASES, Spread, own_ms
from megatron3d.parallel.exposed_comm import ExposedComm

Table = Mapping[str, Spread]
TIMERS, MEMORY = "timers", "memory"


class RankStatistics:
    """Reduces each rank's numbers; every rank has the same list of labels.

    Args:
        num_lanes: lanes of a streamed dataset whose bad records are skipped; 0 without one.

    Attributes:
        devices: host and device of each rank, on rank 0; empty elsewhere.
    """

    def __init__(self, comm: ProcessComm, device: torch.device, num_lanes: int = 0) -> None:
        self._comm, self._mesh, self._device = comm, comm.mesh, device
        self._lanes = tuple(f"skipped records of lane {lane}" for lane in range(num_lanes))
        self._timers = (*PHASES, *map(ExposedComm, comm.axis_sets))
        self._memory = tuple(memory_bytes(device))
        self.devices: Sequence[str] = comm.gather_object(f"host {socket.gethostname()}, {device_name(device)}") or ()

    def reduce(self, times_ms: Mapping[str, float], skipped_records: Sequence[int] = ()) -> Table:
        """Return the spread over ranks of every label's number, the same on every rank.

        Args:
            times_ms: milliseconds of this rank by phase.
            skipped_records: records that this rank has skipped, by lane.
        """
        labels = *self._timers, *self._memory, *self._lanes
        mine = {**times_ms, **memory_bytes(self._device), **dict(zip(self._lanes, skipped_records, strict=True))}
        assert mine.keys() <= set(labels), f"{mine.keys() - set(labels)} are no labels of the other ranks"
        values = torch.tensor([mine.get(label, 0.0) for label in labels], dtype=torch.float64, device=self._device)
        highest, lowest = self._all_reduce(torch.cat((values, -values)), "max").chunk(2)
        mean = self._all_reduce(values.clone(), "sum") / self._mesh.world_size
        mine_if_highest = torch.where(values == highest, -self._mesh.rank, -self._mesh.world_size)
        holder = -self._all_reduce(mine_if_highest.to(torch.float64), "max")
        rows = zip(labels, (-lowest).tolist(), highest.tolist(), holder.tolist(), mean.tolist(), strict=True)
        return {label: Spread(low, high, int(rank), average) for label, low, high, rank, average in rows}

    def own_ms(self, times_ms: Mapping[str, float]) -> list[float]:
        """Return the milliseconds of every rank's own work, in rank order, on every rank; one number per rank."""
        mine = torch.tensor([own_ms(times_ms)], dtype=torch.float64, device=self._device)
        everyone: list[float] = self._comm.all_gather(mine, self._mesh.names, dim=0).wait().tolist()
        return everyone

    def _all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return self._comm.all_reduce(x, self._mesh.names, op).wait()

    def skipped_records(self, ranks: Table) -> int | None:
        """Return the skipped records of all lanes, each as counted by the ranks that read it; None without lanes."""
        return sum(int(ranks[lane].max) for lane in self._lanes) if self._lanes else None

    def tables(self, ranks: Table) -> dict[str, Table]:
        """Return the spread over ranks of the milliseconds of each phase that took any, and of the bytes."""
        wanted = {TIMERS: self._timers, MEMORY: self._memory}
        return {
            name: {label: ranks[label] for label in labels if ranks[label].max > 0} for name, labels in wanted.items()
        }
