"""KV cache: keys and values of earlier positions, so that a decoded token costs the work of one position (Pope et al.
2022, arXiv:2211.05102, section 3).

A rank caches the heads and sequences that it computes, in every layout.  A position is written before it is read, and
earlier positions never read it: padding behind a sequence's end is overwritten before it is read.
Latent attention caches latents with the rotary key in place of keys, and values without features (`attention.py`).
A layer with a window keeps its last positions in a ring: index i of a rank's positions is in slot i mod R.
Letters: B sequences of this rank, S new positions, L positions in the cache, G key/value heads, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one microbatch by layer, for up to `capacity` positions; it grows in blocks.

    Attributes:
        num_bytes: bytes held on this rank.
        keeps_hidden: the last stage keeps its final hidden states as well, of whole sequences of the microbatch.
        forgets: layers with a window keep the positions that later ones may see; a text may then go back by no more
            than `BACK` positions.
    """

    BLOCK = 64
    BACK = 1
    HIDDEN = "final hidden states"

    def __init__(self, capacity: int, keeps_hidden: bool = False, forgets: bool = False) -> None:
        self.capacity, self.keeps_hidden, self.forgets = capacity, keeps_hidden, forgets
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for pair in self._kept.values() for t in pair)

    def slots_of_ring(self, window: int | None, num_ranks: int = 1) -> int | None:
        """Return the slots in which each of the context ranks keeps the positions of a window; None: it keeps all."""
        if window is None or not self.forgets or window + self.BACK >= self.capacity:
            return None
        return -(-(window + self.BACK) // num_ranks)

    def can_go_back(self, held: int, start: int) -> bool:
        """Return whether a text of which `held` positions were written may go on at position `start`."""
        return not self.forgets or held - start <= self.BACK

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
            assert length <= (most or self.capacity), f"position {length - 1} in a cache of {self.capacity}"
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

    def ring(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, length: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return a layer's ring of `slots`, or as many as positions up to `length` need, and a slot for padding.

        The arguments are new keys and values, of which it takes only the shapes.
        """
        if site not in self._kept or self._kept[site][0].shape[1] < min(length, slots) + 1:
            self._grow(site, (k_BSGD, v_BSGD), length + 1, slots + 1)
        return self._kept[site]

    def _grow(self, site: str, likes: tuple[Tensor, Tensor], length: int, most: int) -> None:
        capacity = min(-(-length // self.BLOCK) * self.BLOCK, most)
        before = self._kept.pop(site, ())
        wider = tuple(like.new_zeros((like.shape[0], capacity, *like.shape[2:])) for like in likes)
        for old, new in zip(before, wider, strict=False):
            new[:, : old.shape[1]] = old
        self._kept[site] = (wider[0], wider[1])


class Seen(NamedTuple):
    """Keys and values [B, T, G, D] of a layer that new tokens may see, and which of them each one sees.

    Attributes:
        mask_BWT: True where a new token sees a key.
    """

    k: Tensor
    v: Tensor
    mask_BWT: Tensor


@dataclass(frozen=True)
class CacheView:
    """KV cache as the new tokens of one microbatch see it, in prefill or decode.

    Attributes:
        positions_BS: positions of the new tokens of the whole microbatch.
        mine_BS: positions in those sequences whose attention this rank computes.
        ends_B: for each of these sequences the position behind its last new token that is no padding.
        length: a number above all positions.
        has_logits: the pass ends in logits.
    """

    cache: KVCache
    positions_BS: Tensor
    mine_BS: Tensor
    ends_B: Tensor
    length: int
    has_logits: bool

    def extend(
        self, site: str, k_BWGD: Tensor, v_BWGD: Tensor, window: int | None = None, rank: int = 0, num_ranks: int = 1
    ) -> Seen:
        """Write a layer's new keys and values at the positions of a context rank; return what it holds.

        Position p is in slot p // num_ranks of rank p mod num_ranks.  The new tokens of a sequence follow one another,
        and their number is a multiple of the ranks.
        """
        slots = self.cache.slots_of_ring(window, num_ranks)
        if num_ranks == 1 and slots is None:
            k, v = self.cache.write(site, k_BWGD, v_BWGD, self.mine_BS, self.length)
            return Seen(k, v, self._sees(self.mine_BS, torch.arange(self.length, device=k.device), window))
        width, first_B1 = k_BWGD.shape[1], self.mine_BS[:, :1]
        queries_BW = first_B1 + torch.arange(width, device=first_B1.device)
        columns = (rank - first_B1) % num_ranks + torch.arange(0, width, num_ranks, device=first_B1.device)
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        k, v, length = k_BWGD[rows, columns], v_BWGD[rows, columns], -(-self.length // num_ranks)
        slots_BN = (first_B1 + columns) // num_ranks
        if slots is not None:
            ring = self.cache.ring(site, k, v, length, slots)
            k, v, slots_BT = _extended(ring, (k, v), slots_BN, -(-(self.ends_B - rank) // num_ranks), slots)
        else:
            most = max(length, -(-self.cache.capacity // num_ranks))
            k, v = self.cache.write(site, k, v, slots_BN, length, most)
            slots_BT = torch.arange(length, device=k.device)
        return Seen(k, v, self._sees(queries_BW, slots_BT * num_ranks + rank, window))

    @staticmethod
    def _sees(queries_BW: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Return [B, W, T]: which keys at positions [T] or [B, T] each new token sees, the last `window` or all."""
        keys_BT = keys.unsqueeze(-2)
        distance = queries_BW.unsqueeze(-1) - keys_BT
        seen = (distance >= 0) & (keys_BT >= 0)
        return seen if window is None else seen & (distance < window)


def _extended(
    ring: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], slots_BN: Tensor, ends_B: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Write new keys and values to a ring of `size` slots; return what it held before, followed by them, and the index
    [B, T] of each among the rank's positions, negative where there is none.

    `ends_B` are the indices behind the last that is no padding, which is written to the slot that nobody reads.
    """
    held = ring[0].shape[1] - 1
    last_B1 = slots_BN[:, :1] - 1
    before_BR = last_B1 - (last_B1 - torch.arange(held, device=last_B1.device)) % size
    k, v = (torch.cat((old[:, :held], some), dim=1) for old, some in zip(ring, new, strict=True))
    ends_B1 = ends_B.unsqueeze(1)
    is_kept = (slots_BN < ends_B1) & (slots_BN >= ends_B1 - size)
    rows = torch.arange(len(slots_BN), device=slots_BN.device).unsqueeze(1)
    for old, some in zip(ring, new, strict=True):
        old[rows, torch.where(is_kept, slots_BN % size, held)] = some
    return k, v, torch.cat((before_BR, slots_BN), dim=1)
