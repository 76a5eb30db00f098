"""KV cache: keys and values of earlier positions, so that a decoded token costs the work of one position (Pope et al.
2022, arXiv:2211.05102, section 3).

A rank caches the heads and sequences that it computes, in every layout.  A position is written before it is read, and
earlier positions never read it: padding behind a sequence's end is overwritten before it is read.
Latent attention caches latents with the rotary key in place of keys, and values without features (`ops/latent.py`).
Letters: B sequences of this rank, S new positions, L positions in the cache, G key/value heads, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one microbatch by layer, for up to `capacity` positions; it grows in blocks.

    Attributes:
        num_bytes: bytes held on this rank.
        keeps_hidden: the last stage keeps its final hidden states as well, of whole sequences of the microbatch.
    """

    BLOCK = 64
    HIDDEN = "final hidden states"

    def __init__(self, capacity: int, keeps_hidden: bool = False) -> None:
        self.capacity, self.keeps_hidden = capacity, keeps_hidden
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for pair in self._kept.values() for t in pair)

    def attended_length(self, length: int, device: torch.device) -> int:
        """Return a number of positions to attend to, at least `length`; those beyond are masked.

        On an accelerator it is whole blocks, since cuDNN builds a graph for every length that it sees.
        """
        return length if device.type == "cpu" else min(-(-length // self.BLOCK) * self.BLOCK, self.capacity)

    def write(
        self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, positions_BS: Tensor, length: int, most: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return those [B, length, G, D] of all positions below `length`.

        `most` is the largest number of slots; default: the capacity.
        """
        if site not in self._kept or self._kept[site][0].shape[1] < length:
            self._grow(site, (k_BSGD, v_BSGD), length, most or self.capacity)
        rows = torch.arange(len(positions_BS), device=positions_BS.device).unsqueeze(1)
        for kept, new in zip(self._kept[site], (k_BSGD, v_BSGD), strict=True):
            kept[rows, positions_BS] = new
        k, v = self._kept[site]
        return k[:, :length], v[:, :length]

    def write_hidden(self, x_BSH: Tensor, positions_BS: Tensor) -> None:
        """Keep the final hidden states of new tokens of a microbatch."""
        length = int(positions_BS.max()) + 1
        self.write(self.HIDDEN, x_BSH.unsqueeze(2), x_BSH[..., :0].unsqueeze(2), positions_BS, length)

    def hidden(self, positions_BS: Tensor) -> Tensor:
        """Return the final hidden states [B, S, H] at positions of a microbatch; what was not written is undefined."""
        kept = self._kept[self.HIDDEN][0]
        rows = torch.arange(len(positions_BS), device=positions_BS.device).unsqueeze(1)
        x_BSH: Tensor = kept[rows, positions_BS.clamp(max=kept.shape[1] - 1), 0]
        return x_BSH

    def _grow(self, site: str, likes: tuple[Tensor, Tensor], length: int, most: int) -> None:
        capacity = min(-(-length // self.BLOCK) * self.BLOCK, most)
        assert capacity >= length, f"position {length - 1} in a cache of {self.capacity}"
        before = self._kept.pop(site, ())
        wider = tuple(like.new_zeros((like.shape[0], capacity, *like.shape[2:])) for like in likes)
        for old, new in zip(before, wider, strict=False):
            new[:, : old.shape[1]] = old
        self._kept[site] = (wider[0], wider[1])


@dataclass(frozen=True)
class CacheView:
    """KV cache as the new tokens of one microbatch see it, in prefill or decode.

    Attributes:
        positions_BS: positions of the new tokens of the whole microbatch.
        mine_BS: positions in those sequences whose attention this rank computes.
        length: a number above all positions.
        has_logits: the pass ends in logits.
    """

    cache: KVCache
    positions_BS: Tensor
    mine_BS: Tensor
    length: int
    has_logits: bool

    def mask_BSL(self, window: int | None = None) -> Tensor:
        """Return which positions below `length` each new token attends to: the last `window`, or all, up to its own."""
        if window is None or window >= self.length:
            return self._distance_BSL >= 0
        return (self._distance_BSL >= 0) & (self._distance_BSL < window)

    @cached_property
    def _distance_BSL(self) -> Tensor:
        return self.mine_BS.unsqueeze(-1) - torch.arange(self.length, device=self.mine_BS.device)

    def extend(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return those at all positions below `length`."""
        return self.cache.write(site, k_BSGD, v_BSGD, self.mine_BS, self.length)

    def extend_slots(
        self, site: str, k_BWGD: Tensor, v_BWGD: Tensor, rank: int, num_ranks: int
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values at the positions of a context rank; return all that it holds.

        Position p is in slot p // num_ranks of rank p mod num_ranks.  The new tokens of a sequence follow one another,
        and their number is a multiple of the ranks.
        """
        width = k_BWGD.shape[1]
        first_B = self.mine_BS[:, :1]
        columns = (rank - first_B) % num_ranks + torch.arange(0, width, num_ranks, device=first_B.device)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        length = -(-self.length // num_ranks)
        k, v = k_BWGD[rows, columns], v_BWGD[rows, columns]
        most = max(length, -(-self.cache.capacity // num_ranks))
        return self.cache.write(site, k, v, (first_B + columns) // num_ranks, length, most)

    def slot_mask(self, window: int | None, rank: int, num_ranks: int, num_slots: int) -> Tensor:
        """Return bool [B, W, T]: which slots of a context rank each new token attends to."""
        device, width = self.mine_BS.device, self.positions_BS.shape[1]
        queries_BW = self.mine_BS[:, :1] + torch.arange(width, device=device)
        distance = queries_BW.unsqueeze(-1) - (torch.arange(num_slots, device=device) * num_ranks + rank)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)
