"""One microbatch on its way through the model: what it is, where it stands in the batch, and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.layout import span
from megatron3d.mesh import Axes, Mesh
from megatron3d.ops.cache import Known


@dataclass(frozen=True)
class Target:
    """What the loss is made of.

    Attributes:
        labels_M: what follows each token of the sequences that I read.
        num_tokens: valid tokens of the global batch, by which the loss is divided.
        scale: what gradients, but not the loss, are multiplied by.
    """

    labels_M: Tensor
    num_tokens: int
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
    """

    tokens_BS: Tensor
    target: Target | None
    num_sequences: int
    first_sequence: int
    key: tuple[int, int] | None
    rotary: tuple[Tensor, Tensor] | None
    known: Known | None = None

    @property
    def seq_length(self) -> int:
        """Positions of a sequence."""
        return self.tokens_BS.shape[1]

    def token_rows(self, axes: Axes, mesh: Mesh, device: torch.device) -> Tensor:
        """Index in the global batch of each of my tokens, where `axes` split a microbatch's tokens."""
        low, high = span(self.num_sequences * self.seq_length, axes, mesh)
        offset = self.first_sequence * self.seq_length
        return torch.arange(offset + low, offset + high, device=device)

    def positions(self, rows: Tensor) -> Tensor:
        """Where tokens with these indices in the global batch stand in their sequences."""
        return self.known.positions_BS.flatten()[rows] if self.known else rows % self.seq_length
