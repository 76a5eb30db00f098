"""Exchange of positions for heads between context ranks (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509).

    [B, N, L, D]  of this rank's positions  ->  [B, N / c, S, D]  of all positions, in their order

Keys and values with fewer heads than ranks are copied, and the gradients of the copies are summed.
Letters: B sequences, N query heads, G key/value heads, L positions of a rank, S positions of all c ranks, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.attention_pairs import Span
from megatron3d.parallel.context_exchange import key_copies
from megatron3d.parallel.mesh import Axes


class _AllToAll(torch.autograd.Function):
    """Blocks [c, ...] sent to each rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, comm: Comm) -> Tensor:
        ctx.axes, ctx.comm = axes, comm
        return comm.all_to_all(x, axes).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_to_all(dy, ctx.axes).wait(), None, None


class HeadExchange:
    """Exchange over `axes`.

    Args:
        held: for each rank, in order, the chunks of positions that it holds.
    """

    def __init__(self, held: tuple[tuple[Span, ...], ...], axes: Axes, comm: Comm) -> None:
        self._axes, self._comm, self._ranks = axes, comm, len(held)
        rows = [0] * len(held)
        places: list[tuple[Span, int, Span]] = []
        for rank, chunks in enumerate(held):
            for chunk in chunks:
                first, rows[rank] = rows[rank], rows[rank] + chunk[1] - chunk[0]
                places.append((chunk, rank, (first, rows[rank])))
        self._places = sorted(places)

    def whole_positions(self, q_BNLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's share of the heads, at all positions in order."""
        copies = key_copies(k_BGLD.shape[1], self._ranks)
        k, v = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (k_BGLD, v_BGLD))
        blocks = [t.unflatten(1, (self._ranks, -1)).movedim(1, 0) for t in (q_BNLD, k, v)]
        received: Tensor = _AllToAll.apply(torch.cat(blocks, dim=2), self._axes, self._comm)
        whole = torch.cat([received[rank, :, :, low:high] for _, rank, (low, high) in self._places], dim=2)
        q, k, v = whole.split([block.shape[2] for block in blocks], dim=1)
        return q, k, v

    def own_heads(self, x_N: Tensor | None) -> Tensor | None:
        """Return what belongs to this rank's share of the heads, of a number for each of them."""
        return None if x_N is None else x_N.unflatten(0, (self._ranks, -1))[self._comm.mesh.index(self._axes)]

    def own_positions(self, y_BNSD: Tensor) -> Tensor:
        """Return all heads at this rank's positions, [B, N, L, D], from its share of the heads at all positions."""
        parts = y_BNSD.split([high - low for (low, high), _, _ in self._places], dim=2)
        of_rank: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for part, (_, rank, _) in zip(parts, self._places, strict=True):
            of_rank[rank].append(part)
        blocks = torch.stack([torch.cat(each, dim=2) for each in of_rank])
        received: Tensor = _AllToAll.apply(blocks, self._axes, self._comm)
        return received.movedim(0, 1).flatten(1, 2)
