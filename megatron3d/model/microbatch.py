"""One microbatch on its way through the model: what it is, where it stands in the batch, and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.packing import Documents
from megatron3d.ops.kv_cache import Known
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes, Mesh


@dataclass(frozen=True)
class Target:
    """What the loss is made of.

    Attributes:
        labels_M: what follows each token of the sequences that I read, negative where that counts nothing.
        num_tokens: valid tokens of the global batch, by which the loss is divided.
        scale: what gradients, but not the loss, are multiplied by.
    """

    labels_M: Tensor
    num_tokens: int | Tensor
    scale: Tensor | float


@dataclass(frozen=True)
class Pass:
    """One microbatch on its way through the model.

    Attributes:
        tokens_BS: the sequences that I read.
        target: None where logits are wanted instead of the loss.
        num_sequences: sequences of the whole microbatch, over all ranks that share it.
        first_sequence: where the microbatch begins in the global batch.
        key: (seed, iteration) of dropout, or None when evaluating.
        rotary: cos and sin, or None.
        known: where the tokens stand and what is kept of those before them; None where they begin their sequences.
        documents: where they begin in my sequences, of which the microbatch has `first_row` before; None: as if one.
        mask_BSS: which tokens see which in my sequences; None: all that came before.
    """

    tokens_BS: Tensor
    target: Target | None
    num_sequences: int
    first_sequence: int
    key: tuple[int, int] | None
    rotary: tuple[Tensor, Tensor] | None
    known: Known | None = None
    documents: Documents | None = None
    first_row: int = 0
    mask_BSS: Tensor | None = None

    @property
    def seq_length(self) -> int:
        """Positions of a sequence."""
        return self.tokens_BS.shape[1]

    def token_rows(self, axes: Axes, mesh: Mesh, device: torch.device) -> Tensor:
        """Index in the global batch of each of my tokens, where `axes` split a microbatch's tokens."""
        low, high = span(self.num_sequences * self.seq_length, axes, mesh)
        offset = self.first_sequence * self.seq_length
        return torch.arange(offset + low, offset + high, device=device)

    def rows(self, x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
        """What belongs to the sequences that `axes` leave me, of `x` [B, ...] for those that I read."""
        low, high = span(self.num_sequences, axes, mesh)
        return x[low - self.first_row : high - self.first_row]

    def positions(self, axes: Axes, mesh: Mesh, device: torch.device) -> Tensor:
        """Where my tokens stand in their sequences or documents, where `axes` split a microbatch's tokens."""
        if self.documents is not None and self.documents.positions_BS is not None:
            low, high = span(self.num_sequences * self.seq_length, axes, mesh)
            before = self.first_row * self.seq_length
            return self.documents.positions_BS.flatten()[low - before : high - before]
        rows = self.token_rows(axes, mesh, device)
        return self.known.positions_BS.flatten()[rows] if self.known else rows % self.seq_length
