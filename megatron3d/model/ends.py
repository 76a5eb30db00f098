"""The ends of a GPT for every layout: the embedding, and the LM head with its loss.

Letters: M tokens, H hidden, B sequences, S positions, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron3d.model.microbatch import Pass
from megatron3d.model.modules import Build
from megatron3d.ops.cross_entropy import LMHead, head_logits, head_loss
from megatron3d.ops.embedding import embedding
from megatron3d.parallel.loss_chunks import LossChunk


class Embedding(nn.Module):
    """Word embedding [M] -> [M, H], plus learned position embeddings if the table has them under this name.

    It has no weight of its own where it looks up rows of another module's.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        self.plan, self.comm, self.main_grads = build.plan(build.mode.embed), build.comm, build.main_grads
        self.padded_vocab_size, self.tokens = build.arch.padded_vocab_size, build.mode.residual[0]
        self.scale = build.arch.embedding_scale
        self.weight = build.optional(f"{name}.weight")
        self.position = build.optional(f"{name}.position")

    def forward(self, at: Pass, w_VH: Tensor) -> Tensor:
        """Return the rows of `w_VH` of the tokens of a pass."""
        tokens_M, size = at.tokens_BL.flatten(), self.padded_vocab_size
        x_MH = embedding(tokens_M, w_VH, size, self.plan, self.comm, self.main_grads)
        x_MH = x_MH if self.scale == 1 else x_MH * self.scale
        if self.position is None:
            return x_MH
        return x_MH + F.embedding(at.positions(self.tokens, x_MH.device), self.position)


class LossHead(nn.Module):
    """LM head and its loss; it has no weight of its own where it multiplies by another module's."""

    def __init__(self, name: str, chunk: LossChunk, build: Build) -> None:
        super().__init__()
        arch, plan = build.arch, build.plan(build.mode.expand)
        self.weight = build.optional(f"{name}.weight")
        self.inner = build.mode.inner
        self.scale = arch.logit_scale
        sizes = arch.vocab_size, arch.padded_vocab_size
        self.head = LMHead(plan, build.comm, *sizes, chunk, build.main_grads, softcap=arch.logit_softcap)

    def forward(self, x_MH: Tensor, w_VH: Tensor, at: Pass) -> Tensor:
        """Return this rank's share of the loss; the logits [B, S, V] if the pass has no target."""
        x_MH = x_MH if self.scale == 1 else x_MH * self.scale
        if at.target is None:
            return self._logits(x_MH, w_VH, at)
        target = at.target
        return head_loss(x_MH, w_VH, target.labels_M, target.num_tokens, self.head, target.scale)

    def _logits(self, x_MH: Tensor, w_VH: Tensor, at: Pass) -> Tensor:
        """Return logits [B, S, V] of every sequence of the microbatch, on each rank of the last stage."""
        head, (tokens, features) = self.head, self.inner
        whole = head.comm.all_gather(head_logits(x_MH, w_VH, head), features, dim=1).wait()[:, : head.vocab_size]
        logits_MV = head.comm.all_gather(whole, tokens, dim=0).wait()
        return at.whole_sequences(logits_MV)
