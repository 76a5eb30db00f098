"""One microbatch in the model: its tokens, its place in the global batch, and its labels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from megatron3d.attention.context.order import HeldPositions, cut_positions
from megatron3d.attention.context.plan import TokenOrder
from megatron3d.attention.kv_cache import CacheView
from megatron3d.attention.packed import Visible
from megatron3d.attention.rotary import PositionTables
from megatron3d.data.packing import Documents
from megatron3d.ops.recompute import KeptResults, OutputAgain
from megatron3d.parallel.mesh import Axes

T = TypeVar("T")


def local_positions(x_BS: Tensor, order: TokenOrder, held: HeldPositions | None) -> Tensor:
    """Return the positions of this rank from those of whole sequences; `held`: where documents divide them."""
    return held.cut(x_BS) if held else cut_positions(x_BS, order.chunks(x_BS.shape[1]), dim=1)


@dataclass(frozen=True)
class Target:
    """Labels and divisor of the loss.

    Attributes:
        labels_M: label of each token that this rank reads; negative labels are ignored.
        num_tokens: valid tokens of the global batch, by which the loss is divided.
        scale: factor of the gradients, but not of the loss (fp16 loss scaling).
        all_tokens: tokens of the global batch, by which the losses of routers are divided.
    """

    labels_M: Tensor
    num_tokens: int | Tensor
    scale: Tensor | float
    all_tokens: int = 1


@dataclass(frozen=True)
class Ahead:
    """Inputs of one module of multi-token prediction: for each position the token k places further, and its label."""

    tokens_BL: Tensor
    target: Target


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Inputs of one microbatch's pass through the model.

    Attributes:
        tokens_BL: tokens that this rank reads: its positions of its sequences.
        seq_length: positions of a whole sequence.
        order: says which tokens those are.
        num_sequences: sequences of the whole microbatch, over all ranks among which it is sharded.
        rotary: tables of each rotary embedding of the model for this rank's positions, in the order of
            `model.spec.rotaries`, and then the factors of queries, if the model has them.
        target: labels of the loss; None: the pass returns logits.
        first_sequence: index of the first sequence in the global batch.
        key: (seed, iteration) of dropout; None in evaluation.
        cached: KV cache of the preceding tokens; None where sequences start here.
        documents: document boundaries in this rank's whole sequences; None: one document per sequence.
        ahead: inputs of the modules of multi-token prediction, which only passes with a target have.
        held: positions of this rank where each sequence is divided by its own documents; None: `order.chunks` of all.
        kept: what layers that are recomputed keep besides their input.
        normed: recomputes the input of attention or MLP, the output of a norm; None: nothing does.
    """

    tokens_BL: Tensor
    seq_length: int
    order: TokenOrder
    num_sequences: int
    rotary: tuple[PositionTables, ...]
    target: Target | None = None
    first_sequence: int = 0
    key: tuple[int, int] | None = None
    cached: CacheView | None = None
    documents: Documents | None = None
    ahead: tuple[Ahead, ...] = ()
    held: HeldPositions | None = None
    kept: KeptResults | None = None
    normed: OutputAgain | None = None

    def saving(self, normed: OutputAgain | None) -> Pass:
        """Return this pass for a module whose input `normed` recomputes."""
        return self if normed is self.normed else replace(self, normed=normed)

    def reads_input(self) -> AbstractContextManager[None]:
        """Return a context for what reads a module's input: where that is recomputed, autograd does not save it."""
        return nullcontext() if self.normed is None else self.normed.context()

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return `find()`, or what it returned in forward where this pass recomputes a layer."""
        return find() if self.kept is None else self.kept.once(name, find)

    @property
    def first_row(self) -> int:
        """Index in the microbatch of the first sequence that this rank reads."""
        return self.order.sequences(self.num_sequences, self.order.batch)[0]

    @property
    def has_end(self) -> bool:
        """Whether the pass ends in the loss or in logits; if not, it only extends a cache."""
        return self.cached is None or self.cached.has_logits

    @property
    def keeps_hidden(self) -> bool:
        """Whether the last stage keeps its final hidden states in the cache."""
        return self.cached is not None and self.cached.cache.keeps_hidden

    @property
    def local_length(self) -> int:
        """Return the number of positions of each sequence on this rank."""
        return self.tokens_BL.shape[1]

    @property
    def document_positions_BL(self) -> Tensor | None:
        """Positions of this rank's tokens in their sequences or documents, None where all sequences have the same."""
        if self.documents is not None and self.documents.positions_BS is not None:
            return self.cut(self.documents.positions_BS)
        return self.held.mine_BL if self.held else None

    def cut(self, x_BS: Tensor) -> Tensor:
        """Return the positions of this rank from those of whole sequences."""
        return local_positions(x_BS, self.order, self.held)

    def whole_sequences(self, x_MF: Tensor) -> Tensor:
        """Return [B, S, F] of all sequences from the rows [M, F] of all ranks, in their order."""
        num_ranks, size = self.order.num_ranks, self.seq_length
        if num_ranks == 1:
            unsplit: Tensor = x_MF.unflatten(0, (-1, size))
            return unsplit
        if self.held is not None:
            assert self.order.num_groups == 1, "logits of documents are put in order by ranks that read all of them"
            by_rank = x_MF.unflatten(0, (num_ranks, -1, 1, self.local_length))
            return self.held.among(0, num_ranks).gathered(by_rank).squeeze(1)
        held = [span for rank in range(num_ranks) for span in self.order.chunks(size, rank)]
        in_order = sorted(range(len(held)), key=lambda index: held[index])
        groups = x_MF.unflatten(0, (self.order.num_groups, num_ranks, -1, len(held) // num_ranks, size // len(held)))
        chunks = groups.transpose(1, 2).flatten(2, 3)  # sequences, then chunks as they are held
        return torch.cat([chunks[:, :, index] for index in in_order], dim=2).flatten(0, 1)

    def token_rows(self, axes: Axes, device: torch.device) -> Tensor:
        """Return the index in the global batch of each token of this rank, where `axes` shard the tokens."""
        low, high = self.order.local_rows(self.num_sequences, self.seq_length, axes)
        offset = (self.first_sequence + self.first_row) * self.seq_length
        if self.local_length == self.seq_length:
            return torch.arange(offset + low, offset + high, device=device)
        rows = torch.arange(low, high, device=device)
        if self.held is not None:
            return offset + rows // self.local_length * self.seq_length + self.held.mine_BL.flatten()[low:high]
        positions = cut_positions(torch.arange(self.seq_length, device=device), self.order.chunks(self.seq_length), 0)
        return offset + rows // self.local_length * self.seq_length + positions[rows % self.local_length]

    def sequence_of_rows(self, axes: Axes, device: torch.device) -> Tensor:
        """Return the index, among those that this rank reads, of the sequence of each of its tokens."""
        low, high = self.order.local_rows(self.num_sequences, self.seq_length, axes)
        return torch.arange(low, high, device=device) // self.local_length

    def rows(self, x: Tensor, axes: Axes) -> Tensor:
        """Return the rows of `x` [B, ...] that belong to this rank's sequences, where `axes` shard their tokens."""
        low, high = self.order.sequences(self.num_sequences, axes)
        return x[low - self.first_row : high - self.first_row]

    def visible(self, window: int | None, axes: Axes) -> Visible | None:
        """Return what the queries of this rank's sequences see, where `axes` shard them; None: all before them."""
        starts = None if self.documents is None else self.documents.starts
        if starts is not None:
            low, high = self.order.sequences(self.num_sequences, axes)
            starts = starts[low - self.first_row : high - self.first_row]
        return Visible(starts, window).within(self.seq_length)

    def held_by(self, axes: Axes) -> HeldPositions | None:
        """Return which positions context ranks hold of this rank's sequences, where `axes` shard them."""
        if self.held is None:
            return None
        low, high = self.order.sequences(self.num_sequences, axes)
        return self.held.of(low - self.first_row, high - self.first_row)

    def positions(self, axes: Axes, device: torch.device) -> Tensor:
        """Return the position of each of this rank's tokens in its sequence or document."""
        if self.documents is not None and self.documents.positions_BS is not None:
            low, high = self.order.local_rows(self.num_sequences, self.seq_length, axes)
            return self.cut(self.documents.positions_BS).flatten()[low:high]
        rows = self.token_rows(axes, device)
        return self.cached.positions_BS.flatten()[rows] if self.cached else rows % self.seq_length
