"""The microbatches of a rank: sequences of the global batch by position, independent of the layout.

microbatch j of data rank d = sequences [(j DP + d) MBS, (j DP + d + 1) MBS) of the global batch;
a rank reads the rows that `batch_axes` assign to it

Where DP does not divide the microbatches of the global batch, the last one of some data ranks is empty: its tokens are
EMPTY, which are no labels, so that it adds nothing to losses and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.data.packing import PLAIN, Packing, Starts
from megatron3d.data.ramp_plan import Batch, Batches
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import DATA, Axes, Mesh

# Token of an empty microbatch: negative tokens are no labels, and inputs like token 0.
EMPTY = -1


@dataclass(frozen=True)
class Microbatch:
    """The rows of one microbatch that one rank reads.

    Attributes:
        tokens: int64 [rows, seq_length + 1] on the device.
        first_sample: position in the global batch of the microbatch's first sequence on any rank.
        starts: where documents begin in each row after its first one (`Packing.starts`); None if attention ignores it.
    """

    tokens: Tensor
    first_sample: int
    starts: Starts | None = None


class SampleSource(Protocol):
    """Source of tokens by sample index: a split of a corpus, or random tokens."""

    def read(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [samples, seq_length + 1] tokens."""
        ...


class BatchLoader:
    """Reads the global batch that begins at any sample; it has no state, so resuming takes only that number.

    Attributes:
        positions: positions in the global batch of the sequences that this rank reads.
    """

    def __init__(
        self,
        samples: SampleSource,
        mesh: Mesh,
        batch_axes: Axes,
        micro_batch_size: int,
        global_batch_size: int,
        device: torch.device,
        *,
        packing: Packing = PLAIN,
    ) -> None:
        data_axes = mesh.in_order(DATA)
        data_ranks = mesh.size(data_axes)
        step = micro_batch_size * data_ranks
        assert global_batch_size % micro_batch_size == 0 and global_batch_size >= step, (
            f"global batch {global_batch_size} is not {micro_batch_size} x microbatches of {data_ranks} data ranks"
        )
        low, high = span(micro_batch_size, batch_axes, mesh)
        self._rows = high - low
        self._samples = samples
        self._device, self._packing = device, packing
        self._firsts = range(mesh.index(data_axes) * micro_batch_size, global_batch_size, step)
        self._num_empty = -(-global_batch_size // step) - len(self._firsts)
        self.positions = np.add.outer(np.asarray(self._firsts), np.arange(low, high)).reshape(-1)

    def step(self, consumed_samples: int) -> list[Microbatch]:
        """Return the microbatches of the global batch whose first sequence is sample `consumed_samples`."""
        return self.microbatches(self.read(consumed_samples))

    def read(self, consumed_samples: int, batch: Batch | None = None) -> Tensor:
        """Return the rows of this rank in host memory, pinned if they go to another device.

        `batch` limits them to a smaller batch or a shorter sequence length.
        """
        positions = self.positions if batch is None else self.positions[self.positions < batch.num_samples]
        rows = torch.from_numpy(self._samples.read(consumed_samples + positions))
        rows = rows if batch is None else rows[:, : batch.seq_length + 1].contiguous()
        return rows if self._device.type == "cpu" else rows.pin_memory()

    def microbatches(self, rows: Tensor) -> list[Microbatch]:
        """Copy rows [sequences, seq_length + 1] to the device asynchronously, and return them as microbatches."""
        return self._divided(rows.to(self._device, non_blocking=True), rows)

    def _divided(self, tokens: Tensor, on_host: Tensor) -> list[Microbatch]:
        starts = map(self._packing.starts, on_host.split(self._rows))
        made = [Microbatch(*each) for each in zip(tokens.split(self._rows), self._firsts, starts, strict=False)]
        empty, on_host = (torch.full_like(each[: self._rows], EMPTY) for each in (tokens, on_host))
        return [*made, *(Microbatch(empty, 0, self._packing.starts(on_host)) for _ in range(self._num_empty))]


class SharingLoader(BatchLoader):
    """Reads rows on one of the ranks that need them, and sends them to the others: text is downloaded and encoded once.

    n rows of S tokens are 4 n (S + 1) bytes, which are all-reduced over each axis of `shared`.

    Args:
        seq_length: S of the samples.
        shared: axes along which all ranks need the same rows; each has a process group.
    """

    def __init__(self, *arguments: Any, seq_length: int, comm: Comm, shared: Axes, packing: Packing = PLAIN) -> None:
        super().__init__(*arguments, packing=packing)
        self._seq_length, self._comm, self._shared = seq_length, comm, shared
        self._is_reader = not any(comm.mesh.coord(axis) for axis in shared)

    def read(self, consumed_samples: int, batch: Batch | None = None) -> Tensor:
        """Return the rows as `BatchLoader.read` does on the rank that reads them, and zeros on the others."""
        if self._is_reader:
            return super().read(consumed_samples, batch)
        num_rows = int((self.positions < batch.num_samples).sum()) if batch else len(self.positions)
        return torch.zeros(num_rows, (batch.seq_length if batch else self._seq_length) + 1, dtype=torch.int64)

    def microbatches(self, rows: Tensor) -> list[Microbatch]:
        """Return the rows of the rank that has read them, on all ranks, as microbatches."""
        tokens = rows.to(self._device, torch.int32, non_blocking=True)
        for axis in self._shared:
            tokens = self._comm.all_reduce(tokens, (axis,)).wait()  # of one rank's tokens and zeros
        on_host = tokens.cpu() if self._packing.reset_attention_mask else tokens
        return self._divided(tokens.long(), on_host)


def shared_axes(mesh: Mesh, batch_axes: Axes, groups: Iterable[Axes]) -> Axes:
    """Return the axes along which all ranks read the same rows, and that are among `groups`, for a `SharingLoader`."""
    return tuple(axis for axis in mesh.nontrivial(mesh.without(mesh.names, (*DATA, *batch_axes))) if (axis,) in groups)


class PrefetchingLoader:
    """Returns the microbatches of a `BatchLoader`, and prefetches the next global batch on a thread."""

    def __init__(self, loader: BatchLoader, batches: Batches) -> None:
        self._loader, self._batches = loader, batches
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._next: tuple[int, Future[Tensor]] | None = None

    def step(self, consumed_samples: int) -> list[Microbatch]:
        """Return the microbatches as the loader does; an error of a prefetch is raised when its batch is due."""
        begin, ahead = self._next or (-1, None)
        rows = ahead.result() if ahead is not None and begin == consumed_samples else self._read(consumed_samples)
        following = consumed_samples + self._batches.at(consumed_samples).num_samples
        self._next = following, self._thread.submit(self._read, following)
        return self._loader.microbatches(rows)

    def _read(self, consumed_samples: int) -> Tensor:
        return self._loader.read(consumed_samples, self._batches.at(consumed_samples))
