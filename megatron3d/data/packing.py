"""Packed documents in samples: attention mask, positions, and the tokens that count in the loss.

A document includes its end token.  The options are Megatron-LM's (get_ltor_masks_and_position_ids in
megatron/training/utils.py).  Goldfish loss (Hans et al. 2024, arXiv:2406.10209) excludes a token from the loss where a
hash of the h tokens before it is 0 modulo k.  Letters: B sequences, T = S + 1 tokens of a sample, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -1
"""Label of a token that does not count in the loss."""

Starts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Documents:
    """The documents of the sequences that a rank reads.

    Attributes:
        positions_BS: position in the document, None where positions count through the sequence.
        starts: first positions of the documents after the first one by sequence, known on the host; None where tokens
            attend to other documents too.
    """

    positions_BS: Tensor | None
    starts: Starts | None = None


@dataclass(frozen=True)
class Packing:
    """Treatment of documents and of certain tokens; the default treats samples as plain text.

    Attributes:
        eod: token that ends a document, None where nothing needs one.
        reset_position_ids: restart positions at each document.
        reset_attention_mask: attend only within a document.
        eod_mask_loss: exclude the token after an end of document from the loss.
        pad: token that is excluded from the loss as a label.
        goldfish: (k, h) of goldfish loss.
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    pad: int | None = None
    goldfish: tuple[int, int] | None = None

    @property
    def reason(self) -> str:
        """The first key for which documents must be recognized by `eod`, or an empty string."""
        keys = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        return next((f"data.{key}" for key in keys if getattr(self, key)), "")

    @property
    def masks_loss(self) -> bool:
        """Whether some tokens may be excluded from the loss."""
        return self.eod_mask_loss or self.pad is not None or self.goldfish is not None

    def masks_ahead(self, places: int) -> bool:
        """Return whether some tokens may be excluded as labels that many places further than the next token."""
        return self.masks_loss or (places > 0 and bool(self.reason))

    def labels(self, tokens_BT: Tensor, places: int = 0) -> Tensor:
        """Return labels [B, S], the token after each token; IGNORED where it does not count in the loss.

        With `places` the label is as many places further, and ignored where it lies outside of the sequence, or in
        another document where documents are told apart.
        """
        labels_BS = self._next_labels(tokens_BT)
        if not places:
            return labels_BS
        kept = max(labels_BS.shape[1] - places, 0)
        ahead_BS = torch.full_like(labels_BS, IGNORED)
        ahead_BS[:, :kept] = labels_BS[:, places:]
        if self.reason:
            ends_BS = tokens_BT[:, :-1].eq(-1 if self.eod is None else self.eod)
            for back in range(places + 1 if kept else 0):
                ahead_BS[:, :kept].masked_fill_(ends_BS[:, back : back + kept], IGNORED)
        return ahead_BS

    def _next_labels(self, tokens_BT: Tensor) -> Tensor:
        labels_BS = tokens_BT[:, 1:]
        ignored = torch.zeros_like(labels_BS, dtype=torch.bool)
        if self.eod_mask_loss:
            ignored |= tokens_BT[:, :-1] == self.eod
        if self.pad is not None:
            ignored |= labels_BS == self.pad
        if self.goldfish is not None:
            ignored |= _goldfish(tokens_BT[:, :-1], *self.goldfish)
        return labels_BS.masked_fill(ignored, IGNORED) if self.masks_loss else labels_BS

    def starts(self, tokens_BT: Tensor) -> Starts | None:
        """Return where the documents of sequences [B, S + 1] after the first one begin; None if attention ignores them.

        It reads the tokens: on a GPU they must be those that the host still has.
        """
        if not self.reset_attention_mask:
            return None
        found: list[list[int]] = [[] for _ in tokens_BT]
        for row, place in tokens_BT[:, :-2].eq(-1 if self.eod is None else self.eod).nonzero().tolist():
            found[row].append(place + 1)
        return tuple(map(tuple, found))

    def documents(self, tokens_BS: Tensor, starts: Starts | None = None) -> Documents | None:
        """Return the documents of sequences, None where neither attention nor positions depend on them."""
        if not (self.reset_attention_mask or self.reset_position_ids):
            return None
        return Documents(self._positions(tokens_BS) if self.reset_position_ids else None, starts)

    def _positions(self, tokens_BS: Tensor) -> Tensor:
        ends_BS = tokens_BS.eq(-1 if self.eod is None else self.eod)
        begins_BS = torch.nn.functional.pad(ends_BS, (1, 0))[:, :-1]
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return places_S - torch.where(begins_BS, places_S, 0).cummax(1).values


PLAIN = Packing()


def _goldfish(tokens_BS: Tensor, k: int, h: int) -> Tensor:
    """Return whether the label of each token is excluded, by a hash of the h tokens up to this one."""
    hash_BS = torch.zeros_like(tokens_BS)
    for back in range(min(h, tokens_BS.shape[1])):
        shifted = torch.nn.functional.pad(tokens_BS, (back, 0))[:, : tokens_BS.shape[1]]
        hash_BS = hash_BS * 0x5851F42D4C957F2D + shifted + 1  # overflow wraps around on purpose
    for multiplier in (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D):
        hash_BS = (hash_BS ^ ((hash_BS >> 32) & 0xFFFFFFFF)) * multiplier
    dropped = ((hash_BS >> 33) & 0x3FFFFFFF) % k == 0
    dropped[:, : h - 1] = False  # fewer than h tokens before them
    return dropped
