"""Order of positions in tensors of several context ranks: from that of the ranks to that of positions, and back.

    of each rank [C, .., L, ..]  <->  whole [.., S, ..]      S = C L positions, in ascending order

Sequences that are all divided alike are cut and concatenated; where each is divided by its own documents, indices say
which row of which rank holds a position.
Letters: C ranks, B sequences, L positions of a rank, S positions of all C, N heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron3d.attention.context.plan import Chunks, TokenOrder
from megatron3d.attention.plan import Span


def cut_positions(x: Tensor, chunks: Sequence[Span], dim: int) -> Tensor:
    """Return the chunks of dim `dim`, concatenated; `x` itself where they are all of it."""
    parts = [x.narrow(dim, low, high - low) for low, high in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def add_positions(x: Tensor, chunks: Sequence[Span], dim: int, added: Tensor) -> None:
    """Add to the chunks of dim `dim` what `cut_positions` would return of them."""
    sizes = [high - low for low, high in chunks]
    for (low, _), part in zip(chunks, added.split(sizes, dim), strict=True):
        x.narrow(dim, low, part.shape[dim]).add_(part)


class PositionOrder(Protocol):
    """Order of the positions of some ranks, for tensors of heads."""

    def gathered(self, by_rank: Tensor) -> Tensor:
        """Return [B, N, S, D] from [C, B, N, L, D]."""
        ...

    def scattered(self, whole: Tensor) -> Tensor:
        """Return [C, B, N, L, D] from [B, N, S, D]."""
        ...


class ChunkOrder:
    """Order of the ranks' chunks of positions, which are those of every sequence."""

    def __init__(self, held: Sequence[Sequence[Span]]) -> None:
        rows, places = [0] * len(held), list[tuple[Span, int, slice]]()
        for rank, chunks in enumerate(held):
            for chunk in chunks:
                first, rows[rank] = rows[rank], rows[rank] + chunk[1] - chunk[0]
                places.append((chunk, rank, slice(first, rows[rank])))
        self._num_ranks = len(held)
        self._places = sorted(places, key=lambda place: place[0])

    def gathered(self, by_rank: Tensor) -> Tensor:
        return torch.cat([by_rank[rank, :, :, rows] for _, rank, rows in self._places], dim=2)

    def scattered(self, whole: Tensor) -> Tensor:
        length = whole.shape[2] // self._num_ranks
        by_rank = whole.new_empty((self._num_ranks, *whole.shape[:2], length, *whole.shape[3:]))
        sizes = [high - low for (low, high), _, _ in self._places]
        for part, (_, rank, rows) in zip(whole.split(sizes, dim=2), self._places, strict=True):
            by_rank[rank, :, :, rows] = part
        return by_rank


@dataclass(frozen=True)
class IndexedOrder:
    """Order of positions that differs between sequences.

    Attributes:
        rank_BS, row_BS: rank that holds a position, and its row there.
        place_CBL: among the positions of all C ranks, the place of a rank's row.
    """

    rank_BS: Tensor
    row_BS: Tensor
    place_CBL: Tensor

    @property
    def _sequence_B1(self) -> Tensor:
        return torch.arange(len(self.rank_BS), device=self.rank_BS.device).unsqueeze(1)

    def gathered(self, by_rank: Tensor) -> Tensor:
        return by_rank[self.rank_BS, self._sequence_B1, :, self.row_BS].transpose(1, 2)

    def scattered(self, whole: Tensor) -> Tensor:
        return whole.transpose(1, 2)[self._sequence_B1, self.place_CBL].transpose(2, 3).contiguous()


@dataclass(frozen=True)
class HeldPositions:
    """Which positions the context ranks hold of sequences that are each divided by its own documents.

    Indices are made on the host, once for all layers of a microbatch.

    Attributes:
        starts: where the documents of each sequence begin after its first one.
    """

    order: TokenOrder
    seq_length: int
    starts: tuple[tuple[int, ...], ...]
    device: torch.device
    _parts: dict[Span, HeldPositions] = field(default_factory=dict, compare=False, repr=False)
    _orders: dict[Span, IndexedOrder] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def chunks(self) -> tuple[Chunks, ...]:
        """Chunks of every rank of each sequence."""
        return tuple(self.order.held(self.seq_length, each) for each in self.starts)

    @cached_property
    def mine_BL(self) -> Tensor:
        """Positions of this rank, in the order of its rows."""
        rank = self.order.mesh.index(self.order.context)
        rows = [torch.cat([torch.arange(*chunk) for chunk in chunks[rank]]) for chunks in self.chunks]
        return self._moved(torch.stack(rows))

    def cut(self, x_BS: Tensor) -> Tensor:
        """Return the positions of this rank from `x_BS`."""
        return x_BS.gather(1, self.mine_BL)

    def of(self, low: int, high: int) -> HeldPositions:
        """Return what is held of some of the sequences."""
        if (low, high) == (0, len(self.starts)):
            return self
        if (low, high) not in self._parts:
            self._parts[low, high] = HeldPositions(self.order, self.seq_length, self.starts[low:high], self.device)
        return self._parts[low, high]

    def among(self, first: int, num_ranks: int) -> IndexedOrder:
        """Return the order of the positions that `num_ranks` context ranks hold, from rank `first` on."""
        if (first, num_ranks) not in self._orders:
            made = [_indices(chunks[first : first + num_ranks]) for chunks in self.chunks]
            rank_BS, row_BS, place_BCL = (torch.stack([each[index] for each in made]) for index in range(3))
            order = (self._moved(each) for each in (rank_BS, row_BS, place_BCL.transpose(0, 1).contiguous()))
            self._orders[first, num_ranks] = IndexedOrder(*order)
        return self._orders[first, num_ranks]

    def _moved(self, x: Tensor) -> Tensor:
        return (x.pin_memory() if self.device.type != "cpu" else x).to(self.device, non_blocking=True)


def held_positions(
    order: TokenOrder, seq_length: int, starts: tuple[tuple[int, ...], ...] | None, device: torch.device
) -> HeldPositions | None:
    """Return which positions are held of sequences with these documents; None where all are divided alike."""
    is_one = not order.by_documents or not any(starts or ())
    return None if is_one else HeldPositions(order, seq_length, starts or (), device)


def _indices(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return ranks [S] and rows [S] of the positions of one sequence in their order, and places [C, L]."""
    spans, length = list[tuple[Span, int, int]](), sum(high - low for low, high in chunks[0])
    for rank, each in enumerate(chunks):
        row = 0
        for low, high in each:
            spans.append(((low, high), rank, row))
            row += high - low
    spans.sort()
    ranks = torch.cat([torch.full((high - low,), rank) for (low, high), rank, _ in spans])
    rows = torch.cat([torch.arange(row, row + high - low) for (low, high), _, row in spans])
    places = torch.empty(len(chunks), length, dtype=torch.int64)
    places[ranks, rows] = torch.arange(len(ranks))
    return ranks, rows, places
