"""Attention of pairs of rows whose weights have dropout, for context ranks that do not gather keys.

Masks are a function of (seed, step, layer, sequence, head, position of the query, position of the key), so each pair
makes its part of the mask that one process would make.  The log-sum-exp is that of the weights before dropout, so that
pairs merge as without it; plain matmuls compute them, since the masks of torch's kernels depend on the layout.
Letters: B sequences, N query heads, L query rows, T key rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.ops.attention_pairs import PairKernel, PlainKernel
from megatron3d.ops.dropout import dropout, keep_mask
from megatron3d.parallel.attention_pairs import Pair, Span
from megatron3d.parallel.document_chunks import Chunks

# Dropout of attention weights: rate, key, and index of the first sequence in the global batch.
Drop = tuple[float, int, int]


class DroppedKernel(PlainKernel):
    """Plain matmuls with dropout of the weights by `keep_BNLT`."""

    def __init__(self, softcap: float | None, keep_BNLT: Callable[[torch.device], Tensor], rate: float) -> None:
        super().__init__(softcap)
        self._keep, self._rate = keep_BNLT, rate

    def dropped(self, weights: Tensor) -> Tensor:
        keep = self._keep(weights.device).unflatten(1, weights.shape[1:3])
        return dropout(weights, keep, self._rate)


@dataclass(frozen=True)
class DroppedPairs:
    """Kernels of the pairs of one rank of a ring.

    Attributes:
        num_heads: query heads of the whole model.
        first_head: the first query head of this rank.
        num_sequences: sequences of this rank.
        chunks: positions of each rank of the ring, of each sequence, or once for all.
        place: this rank's place in the ring.
    """

    drop: Drop
    softcap: float | None
    num_heads: int
    first_head: int
    num_sequences: int
    seq_length: int
    chunks: tuple[Chunks, ...]
    place: int

    def of(self, heads: Span, behind: int) -> Callable[[Pair], PairKernel]:
        """Return the kernel of each pair of these heads of this rank with the keys of the rank `behind` places back."""
        first, last = (self.first_head + head for head in heads)

        def kernel(pair: Pair) -> PairKernel:
            return DroppedKernel(self.softcap, lambda device: self._keep(pair, (first, last), behind, device), rate)

        rate = self.drop[0]
        return kernel

    def _keep(self, pair: Pair, heads: Span, behind: int, device: torch.device) -> Tensor:
        """Return bool [B, N, L, T], as `WeightDropout.keep` makes it for whole sequences."""
        rate, key, first_sequence = self.drop
        low, high = pair.sequences or (0, self.num_sequences)
        sequence = torch.arange(first_sequence + low, first_sequence + high, device=device).unsqueeze(1)
        held = self.chunks[low % len(self.chunks)]
        queries = _positions(held[self.place], pair.queries, device)
        keys = _positions(held[self.place - behind], pair.keys, device)
        by_head = (sequence * self.num_heads + torch.arange(*heads, device=device)).unsqueeze(-1)
        keep_MT = keep_mask(key, (by_head * self.seq_length + queries).flatten(), keys, rate)
        keep_BNLT: Tensor = keep_MT.unflatten(0, (high - low, heads[1] - heads[0], len(queries)))
        return keep_BNLT


def _positions(chunks: Sequence[Span], rows: Span, device: torch.device) -> Tensor:
    """Return the positions of rows of a rank."""
    every = torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])
    return every[slice(*rows)]
