"""The ends of a GPT for every layout: the embedding, the LM head with its loss, and multi-token prediction.

Modules that predict further tokens from what the model computed (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2):

    h_i^0 = output of the model's final norm
    h_i^k = final_norm(layer(W_h norm(h_i^(k-1)) + W_e norm(Emb(t_(i+k)))))          logits of t_(i+k+1) = head(h_i^k)

W_h and W_e side by side are the paper's M_k.  Embedding and LM head are those of the model; the layer has the kind of
the model's last one.  Letters: M tokens, H hidden, B sequences, S positions, T = S + 1 tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron3d.comm.interface import Comm
from megatron3d.data.packing import Packing
from megatron3d.model.layers import Layer
from megatron3d.model.linear_spec import MTP_LINEARS
from megatron3d.model.microbatch import Ahead, Pass, Target
from megatron3d.model.modules import Build, HiddenDropout, Linear, Norm
from megatron3d.ops.cross_entropy import LMHead, head_logits, head_loss
from megatron3d.ops.embedding import embedding
from megatron3d.ops.plan import LossChunk
from megatron3d.ops.relayout import relayout
from megatron3d.parallel.layout import span
from megatron3d.parallel.modes.mode import Mode


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


def inputs_ahead(
    tokens_BT: Tensor,
    cut: Callable[[Tensor], Tensor],
    packing: Packing,
    counts: Sequence[int | Tensor],
    scale: Tensor | float,
) -> Iterator[Ahead]:
    """Yield the inputs of each module of a pass, from whole rows [B, S + 1].

    Tokens outside of the row are read as token 0: only labels that do not count depend on them.

    Args:
        cut: returns the positions of this rank from those of whole sequences [B, S].
        counts: valid tokens of the global batch for each module, by which its loss is divided.
        scale: factor of the gradients, but not of the losses.
    """
    for places, count in enumerate(counts, start=1):
        inputs_BS = F.pad(tokens_BT[:, places:].clamp(min=0), (0, places))[:, : tokens_BT.shape[1] - 1]
        labels_BS = packing.labels(tokens_BT, places)
        yield Ahead(cut(inputs_BS), Target(cut(labels_BS).flatten(), count, scale))


def keep_hidden(x_MH: Tensor, at: Pass, mode: Mode, comm: Comm) -> None:
    """Keep the final hidden states of an extending pass, in the residual layout, in its cache."""
    assert at.cached is not None, "only a pass with a cache keeps hidden states"
    (tokens, features), positions_BS = mode.inner, at.cached.positions_BS
    whole_MH = comm.all_gather(relayout(x_MH, mode.residual, mode.inner, comm), features, dim=1).wait()
    whole_MH = comm.all_gather(whole_MH, tokens, dim=0).wait()
    at.cached.cache.write_hidden(at.whole_sequences(whole_MH), positions_BS)


def kept_hidden(at: Pass, mode: Mode, comm: Comm) -> Tensor:
    """Return the final hidden states [M, H] at the positions of an extending pass, in the residual layout."""
    assert at.cached is not None, "only a pass with a cache has kept hidden states"
    x_BSH, (tokens, features) = at.cached.cache.hidden(at.cached.positions_BS), mode.residual
    low, high = span(x_BSH.shape[-1], features, comm.mesh)
    return x_BSH.flatten(0, 1)[at.token_rows(tokens, x_BSH.device), low:high].contiguous()


class PredictionModule(nn.Module):
    """Module k of multi-token prediction, `mtp.{k - 1}`.

    Attributes:
        embedding, head: use the model's matrices; they are called apart from the module, as FSDP units of their own.
    """

    def __init__(self, index: int, chunk: LossChunk, build: Build) -> None:
        super().__init__()
        name, features = f"mtp.{index}", build.mode.residual[1]
        self.mode, self.comm = build.mode, build.comm
        self.embedding = Embedding(f"{name}.embedding", build)
        self.embedding_dropout = HiddenDropout(f"{name}.embedding", build)
        self.hidden_norm = Norm(f"{name}.hidden_norm", features, build)
        self.embedding_norm = Norm(f"{name}.embedding_norm", features, build)
        self.hidden_proj, self.embedding_proj = (Linear(name, linear, build) for linear in MTP_LINEARS)
        self.layer = Layer(build.arch.num_layers - 1, build, f"{name}.layer")
        self.final_norm = Norm(f"{name}.final_norm", features, build)
        self.head = LossHead(f"{name}.head", chunk, build)

    def forward(self, x_MH: Tensor, embedded_MH: Tensor, at: Pass) -> Tensor:
        """Return h^k [M, H] from h^(k-1) and the embeddings of the tokens k places further."""
        embedded_MH = self.embedding_norm(self.embedding_dropout(embedded_MH, at))
        y_MH = self.hidden_proj(self.hidden_norm(x_MH)) + self.embedding_proj(embedded_MH)
        y_MH = relayout(y_MH, self.mode.inner, self.mode.residual, self.comm)
        z_MH: Tensor = self.final_norm(self.layer(y_MH, at))
        return z_MH

    def draft(self, x_MH: Tensor | None, at: Pass, w_VH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return h^k [M, H] of an extending pass, and logits [B, S, V] if it ends in them.

        Args:
            x_MH: h^(k-1); None: the hidden states that the cache keeps.
            w_VH, head_VH: weights of the embedding and of the LM head.
        """
        x_MH = kept_hidden(at, self.mode, self.comm) if x_MH is None else x_MH
        z_MH: Tensor = self(x_MH, self.embedding(at, w_VH), at)
        return z_MH, self.head(z_MH, head_VH, at) if at.has_end else None
