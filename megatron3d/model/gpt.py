"""The GPT: embedding, layers, final norm, and the head with its loss.

Letters: B sequences, S positions, M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron3d.comm import Comm
from megatron3d.config.derive import Architecture
from megatron3d.layout import ParamSpec
from megatron3d.mesh import Axes, Mesh
from megatron3d.model.layers import Build, Embedding, HiddenDropout, Layer, Norm, Pass
from megatron3d.model.params import param_specs
from megatron3d.modes.mode import Mode
from megatron3d.ops.attention import rotary_tables
from megatron3d.ops.loss import Head, head_logits, head_loss
from megatron3d.plan import MatmulPlan, moves


class GPT(nn.Module):
    """A GPT whose parameters have no memory until `zero.Buffers` gives them some.

    `specs` holds the layout of every parameter by its path in the module tree.
    """

    def __init__(self, arch: Architecture, mode: Mode, comm: Comm, loss_chunk_tokens: int) -> None:
        super().__init__()
        self.arch, self.mode, self.comm = arch, mode, comm
        self.specs: Mapping[str, ParamSpec] = param_specs(arch, mode)
        build = Build(arch, mode, comm, self.specs)
        self.embedding = Embedding("embedding", build)
        self.embedding_dropout = HiddenDropout("embedding", build)
        self.layers = nn.ModuleList(Layer(f"layers.{index}", build) for index in range(arch.num_layers))
        self.final_norm = Norm("final_norm", mode.residual[1], build)
        self.head = None if arch.tie_embeddings else HeadWeight("head", build)
        plan = mode.expand.on(comm.mesh)
        self.loss_head = Head(plan, comm, arch.vocab_size, arch.padded_vocab_size, loss_chunk_tokens)

    @property
    def head_weight(self) -> Tensor:
        """The head's [V, H]; the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens_BS: Tensor, first_sequence: int = 0, key: tuple[int, int] | None = None) -> Tensor:
        """The residual stream after the last norm, for the sequences that I read; `key` turns dropout on."""
        num_sequences = tokens_BS.shape[0] * self.comm.mesh.size(self.mode.batch_axes)
        rotary = None
        if self.arch.position_embedding_type == "rope":
            like = self.head_weight
            rotary = rotary_tables(tokens_BS.shape[1], self.arch.kv_channels, self.arch.rotary_base, like)
        at = Pass(num_sequences, tokens_BS.shape[1], first_sequence, key, rotary)
        x_MH = self.embedding_dropout(self.embedding(tokens_BS, at), at)
        for layer in self.layers:
            x_MH = layer(x_MH, at)
        y_MH: Tensor = self.final_norm(x_MH)
        return y_MH

    def forward(
        self, tokens: Tensor, num_tokens: int, first_sequence: int = 0, key: tuple[int, int] | None = None
    ) -> Tensor:
        """My share of the loss: the sum over my tokens divided by `num_tokens` of the global batch.

        `tokens` [B, S + 1] are the sequences that I read; the last one of each is a label only.
        """
        x_MH = self.hidden(tokens[:, :-1], first_sequence, key)
        return head_loss(x_MH, self.head_weight, tokens[:, 1:].flatten(), num_tokens, self.loss_head)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of every sequence of the microbatch, whole on every rank; for sampling, not for training."""
        whole = head_logits(self.hidden(tokens_BS), self.head_weight, self.loss_head)
        tokens, features = self.mode.inner
        whole = self.comm.all_gather(whole, features, dim=1).wait()[:, : self.arch.vocab_size]
        logits_BSV: Tensor = self.comm.all_gather(whole, tokens, dim=0).wait().unflatten(0, (-1, tokens_BS.shape[1]))
        return logits_BSV


class HeadWeight(nn.Module):
    """The head's own matrix where it is not the embedding's."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        self.weight = build.param(f"{name}.weight")


def axis_sets(arch: Architecture, mode: Mode, mesh: Mesh) -> list[Axes]:
    """Every set of axes that a training step communicates over, in one order on all ranks."""
    sets: list[Axes] = [mesh.names]
    for plan in (mode.expand, mode.contract, mode.embed):
        sets += _plan_sets(plan.on(mesh))
    (_, features), (inner_tokens, inner_features) = mode.residual, mode.inner
    inner_features = mesh.nontrivial(inner_features)
    sets += [features, inner_tokens]
    sets += [inner_features[start:] for start in range(len(inner_features))]
    sets += [spec.reduce_axes(mesh) for spec in param_specs(arch, mode).values()]
    return list(dict.fromkeys(live for axes in sets if (live := mesh.nontrivial(axes))))


def _plan_sets(plan: MatmulPlan) -> list[Axes]:
    steps = [*moves(plan.x), *moves(plan.w), *moves(plan.y), *moves(plan.dy), *plan.dx_moves]
    return [step.axes for step in steps]
