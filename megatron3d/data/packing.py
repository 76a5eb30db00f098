"""Documents inside of samples: which tokens a token may see, its position, and which tokens count in the loss.

A document goes up to and with its end token.  The options are Megatron-LM's (get_ltor_masks_and_position_ids in
megatron/training/utils.py); goldfish loss is Hans et al. 2024, arXiv:2406.10209: of the tokens that follow any given h
tokens, one of k contexts is never learnt.  Letters: B sequences, T = S + 1 tokens of a sample, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -1
"""The label of a token that counts nothing."""


@dataclass(frozen=True)
class Documents:
    """The documents of the sequences that a rank reads.

    Attributes:
        segments_BS: number of the document inside of its sequence, None where tokens see other documents too.
        positions_BS: position inside of the document, None where positions go on.
    """

    segments_BS: Tensor | None
    positions_BS: Tensor | None


@dataclass(frozen=True)
class Packing:
    """What documents and other tokens mean to the model; by default nothing.

    Attributes:
        eod: the token that ends a document, None where nothing needs one.
        pad: labels of this token count nothing.
        goldfish: (k, h).
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    pad: int | None = None
    goldfish: tuple[int, int] | None = None

    @property
    def reason(self) -> str:
        """The first key that needs documents."""
        keys = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        return next((f"data.{key}" for key in keys if getattr(self, key)), "")

    @property
    def needs_eod(self) -> bool:
        """Whether documents matter."""
        return bool(self.reason)

    @property
    def masks_loss(self) -> bool:
        """Whether some tokens may count nothing."""
        return self.eod_mask_loss or self.pad is not None or self.goldfish is not None

    def labels(self, tokens_BT: Tensor) -> Tensor:
        """[B, S]: what follows each token, IGNORED where that counts nothing."""
        labels_BS = tokens_BT[:, 1:]
        ignored = torch.zeros_like(labels_BS, dtype=torch.bool)
        if self.eod_mask_loss:
            ignored |= tokens_BT[:, :-1] == self.eod
        if self.pad is not None:
            ignored |= labels_BS == self.pad
        if self.goldfish is not None:
            ignored |= _goldfish(tokens_BT[:, :-1], *self.goldfish)
        return labels_BS.masked_fill(ignored, IGNORED) if self.masks_loss else labels_BS

    def documents(self, tokens_BS: Tensor) -> Documents | None:
        """Where documents begin, None where that matters neither to attention nor to positions."""
        if not (self.reset_attention_mask or self.reset_position_ids):
            return None
        ends_BS = tokens_BS.eq(-1 if self.eod is None else self.eod)
        begins_BS = torch.nn.functional.pad(ends_BS, (1, 0))[:, :-1]
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        starts_BS = torch.where(begins_BS, places_S, 0).cummax(1).values
        return Documents(
            begins_BS.cumsum(1) if self.reset_attention_mask else None,
            places_S - starts_BS if self.reset_position_ids else None,
        )


PLAIN = Packing()


def _goldfish(tokens_BS: Tensor, k: int, h: int) -> Tensor:
    """Whether the label of each token is never learnt, by a hash of the h tokens up to this one."""
    hash_BS = torch.zeros_like(tokens_BS)
    for back in range(min(h, tokens_BS.shape[1])):
        shifted = torch.nn.functional.pad(tokens_BS, (back, 0))[:, : tokens_BS.shape[1]]
        hash_BS = hash_BS * 0x5851F42D4C957F2D + shifted + 1  # wraps around, which is meant
    for multiplier in (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D):
        hash_BS = (hash_BS ^ ((hash_BS >> 32) & 0xFFFFFFFF)) * multiplier
    dropped = ((hash_BS >> 33) & 0x3FFFFFFF) % k == 0
    dropped[:, : h - 1] = False  # their context is not all here
    return dropped


def document_mask(segments_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, S], to be added to scores: 0 where a query (row) may see a key, not later and of its document, else -inf.

    Of booleans torch would make just this, but again in every layer, and keep each until backward.
    """
    may_see = (segments_BS.unsqueeze(-1) == segments_BS.unsqueeze(-2)).tril_()
    return torch.zeros_like(may_see, dtype=dtype).masked_fill_(may_see.logical_not_(), float("-inf"))
