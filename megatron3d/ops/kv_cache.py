"""Keys and values of earlier positions, so that a new token costs one position's work (Pope et al. 2022,
arXiv:2211.05102, section 3).

A rank keeps those heads of those sequences that it computes, in every layout.  A position is written before it is read,
and is never read by an earlier one: what padding leaves behind a sequence's end is overwritten before it counts.
Letters: B sequences of mine, S new positions, L positions in the cache, G key/value heads, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Cache:
    """Keys and values of one microbatch by layer, with room for `capacity` positions; it grows in blocks.

    Attributes:
        num_bytes: what it holds on this rank.
    """

    BLOCK = 64

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for pair in self._kept.values() for t in pair)

    def write(
        self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, positions_BS: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; those [B, length, G, D] of all positions below `length`."""
        if site not in self._kept or self._kept[site][0].shape[1] < length:
            self._grow(site, k_BSGD, length)
        rows = torch.arange(len(positions_BS), device=positions_BS.device).unsqueeze(1)
        for kept, new in zip(self._kept[site], (k_BSGD, v_BSGD), strict=True):
            kept[rows, positions_BS] = new
        k, v = self._kept[site]
        return k[:, :length], v[:, :length]

    def _grow(self, site: str, like: Tensor, length: int) -> None:
        room = min(-(-length // self.BLOCK) * self.BLOCK, self.capacity)
        assert room >= length, f"position {length - 1} in a cache of {self.capacity}"
        before = self._kept.pop(site, ())
        wider = tuple(like.new_zeros((like.shape[0], room, *like.shape[2:])) for _ in range(2))
        for old, new in zip(before, wider, strict=False):
            new[:, : old.shape[1]] = old
        self._kept[site] = (wider[0], wider[1])


@dataclass(frozen=True)
class Known:
    """What the new tokens of a microbatch find.

    Attributes:
        positions_BS: of the new tokens of the whole microbatch.
        mine_BS: of those sequences whose attention this rank computes.
        length: a number above all positions.
        has_logits: whether the pass ends in logits.
    """

    cache: Cache
    positions_BS: Tensor
    mine_BS: Tensor
    length: int
    has_logits: bool

    @cached_property
    def mask_BSL(self) -> Tensor:
        """Which positions below `length` each new token sees: its own and all before."""
        return self.mine_BS.unsqueeze(-1) >= torch.arange(self.length, device=self.mine_BS.device)

    def extend(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer at all positions below `length`, the new ones included."""
        return self.cache.write(site, k_BSGD, v_BSGD, self.mine_BS, self.length)
