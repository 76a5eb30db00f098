"""One microbatch in the model: its tokens, its place in the global batch, and its labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.data.packing import Documents
from megatron3d.ops.kv_cache import CacheView
from megatron3d.parallel.layout import span
from megatron3d.parallel.mesh import Axes, Mesh


@dataclass(frozen=True)
class Target:
    """Labels and divisor of the loss.

    Attributes:
        labels_M: label of each token of the sequences that this rank reads; negative labels are ignored.
        num_tokens: valid tokens of the global batch, by which the loss is divided.
        scale: factor of the gradients, but not of the loss (fp16 loss scaling).
    """

    labels_M: Tensor
    num_tokens: int | Tensor
    scale: Tensor | float


@dataclass(frozen=True)
class Pass:
    """Inputs of one microbatch's pass through the model.

    Attributes:
        tokens_BS: sequences that this rank reads.
        target: labels of the loss; None: the pass returns logits.
        num_sequences: sequences of the whole microbatch, over all ranks among which it is sharded.
        first_sequence: index of the first sequence in the global batch.
        key: (seed, iteration) of dropout; None in evaluation.
        rotary: cos and sin, or None.
        cached: KV cache of the preceding tokens; None where sequences start here.
        documents: document boundaries in this rank's sequences, the first of which is `first_row` of the microbatch;
            None: one document per sequence.
        mask_BSS: attention mask of this rank's sequences; None: causal.
    """

    tokens_BS: Tensor
    target: Target | None
    num_sequences: int
    first_sequence: int
    key: tuple[int, int] | None
    rotary: tuple[Tensor, Tensor] | None
    cached: CacheView | None = None
    documents: Documents | None = None
    first_row: int = 0
    mask_BSS: Tensor | None = None

    @property
    def seq_length(self) -> int:
        """Return the number of positions of a sequence."""
        return self.tokens_BS.shape[1]

    def token_rows(self, axes: Axes, mesh: Mesh, device: torch.device) -> Tensor:
        """Return the index in the global batch of each token of this rank, where `axes` shard the tokens."""
        low, high = span(self.num_sequences * self.seq_length, axes, mesh)
        offset = self.first_sequence * self.seq_length
        return torch.arange(offset + low, offset + high, device=device)

    def rows(self, x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
        """Return the rows of `x` [B, ...] that belong to this rank's sequences, where `axes` shard them."""
        low, high = span(self.num_sequences, axes, mesh)
        return x[low - self.first_row : high - self.first_row]

    def positions(self, axes: Axes, mesh: Mesh, device: torch.device) -> Tensor:
        """Return the position of each of this rank's tokens in its sequence or document."""
        if self.documents is not None and self.documents.positions_BS is not None:
            low, high = span(self.num_sequences * self.seq_length, axes, mesh)
            before = self.first_row * self.seq_length
            return self.documents.positions_BS.flatten()[low - before : high - before]
        rows = self.token_rows(axes, mesh, device)
        return self.cached.positions_BS.flatten()[rows] if self.cached else rows % self.seq_length
