"""Modules of a GPT layer for every layout: a module names its matmul plans and layouts, and `ops` communicates.

The residual stream is [tokens, hidden] in `mode.residual`, the inner stream [tokens, features] in `mode.inner`.
Letters: M tokens, H hidden, F inner features, B sequences, S positions, N heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron3d.attention.attention import (
    AttentionHeads,
    absorbed_attention,
    attention,
    padded,
    whole_features,
    whole_weight,
)
from megatron3d.attention.context.attention import (
    ContextAttention,
    KeptResult,
    cached_context_attention,
    context_attention,
    recomputed_attention,
)
from megatron3d.attention.context.exchanges import gather_positions
from megatron3d.attention.kv_cache import CacheView
from megatron3d.attention.largest_logits import largest_logits
from megatron3d.attention.packed import Visible
from megatron3d.attention.pairs import VANILLA, Drop, Softmax
from megatron3d.attention.rotary import PositionTables, rotate
from megatron3d.model.experts import MoE
from megatron3d.model.linear_spec import DOWN, GATE, KV_UP, PROJ, Q_UP, QKV, layer_linears
from megatron3d.model.microbatch import Pass
from megatron3d.model.modules import MLP, Build, HiddenDropout, Linear, Norm
from megatron3d.model.spec import CORE_ATTN, DENSE_MLP, LAYERNORM, MLA_UP_PROJ, attention_kind, has_experts, rotaries
from megatron3d.ops.dropout import derive_seed
from megatron3d.ops.norm import TORCH_NORMS
from megatron3d.ops.recompute import OutputAgain


class Attention(nn.Module):
    """Self-attention [M, H] -> [M, H]: qkv, rotary embedding, attention over this rank's heads, output projection."""

    def __init__(self, index: int, layer: str, build: Build) -> None:
        super().__init__()
        arch, name = build.arch, f"{layer}.attention"
        kind = attention_kind(arch, index)
        self.window, rotary = kind.window, kind.rotary
        self.rotary = None if rotary is None else rotaries(arch).index(rotary)
        self.has_temperature = kind.temperature is not None
        self.rotate, self.interleaves = rotate, arch.rotary_interleaved
        self.site, self.dropout = name, arch.attention_dropout
        self.query_scale = arch.query_scale
        self.tokens, self.context = build.mode.inner[0], build.mode.context
        self.exchange = build.context_exchange
        heads_axes = build.live(build.mode.inner[1])
        self.heads = AttentionHeads(
            arch.num_attention_heads, arch.num_query_groups, arch.kv_channels, heads_axes, build.comm
        )
        self.logits = build.logits
        if self.logits is not None:
            self.logits.heads[name] = self.heads
        self.add_projections(layer, build)
        self.softcap, self.has_sinks = arch.attention_softcap, arch.softmax_type != VANILLA
        self.sinks = build.optional(f"{name}.sinks")
        self.proj = Linear(layer, PROJ, build)
        self.recomputes_core = build.recompute.recomputes(CORE_ATTN)

    def add_projections(self, layer: str, build: Build) -> None:
        """Add the modules that make queries, keys and values, in the order of the forward pass."""
        arch, name = build.arch, f"{layer}.attention"
        self.qkv = Linear(layer, QKV, build)
        self.norms_heads, self.rotates_first = arch.qk_layernorm_scope == "head", arch.qk_layernorm_after_rope
        norm_axes = () if self.norms_heads else build.mode.inner[1]
        has_norms = arch.qk_layernorm or (arch.qk_l2_norm and self.rotary is not None)
        self.q_norm = Norm(f"{name}.q_norm", norm_axes, build) if has_norms else None
        self.k_norm = Norm(f"{name}.k_norm", norm_axes, build) if has_norms else None
        self.has_gate, self.clip = arch.attention_output_gate, arch.clip_qkv

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        with at.reads_input():
            qkv_MF = self.qkv(x_MH)
        compute = partial(recomputed_attention, self.core) if self.recomputes_core else self.core
        y_MF: Tensor = self.proj(compute(qkv_MF, at))
        return y_MF

    def core(self, qkv_MF: Tensor, at: Pass, kept: KeptResult | None = None) -> Tensor:
        """Return the input [M, F] of the output projection: core attention over the output of qkv [M, F].

        Attention over context ranks that is recomputed finds its result in `kept`.
        """
        if not self.has_gate:
            return self.attend(qkv_MF, at, kept)
        size = (self.heads.query_span[1] - self.heads.query_span[0]) * self.heads.size
        qkv_MF, gate_MF = qkv_MF.split((qkv_MF.shape[1] - size, size), dim=1)
        y_MF: Tensor = self.attend(qkv_MF, at, kept) * gate_MF.sigmoid()
        return y_MF

    def attend(self, qkv_MF: Tensor, at: Pass, kept: KeptResult | None = None) -> Tensor:
        """Return attention's output [M, F] for queries, keys and values of this rank's heads."""
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        q, k, v = self.heads.split(qkv_MF, at.local_length, None if self.norms_heads else norms)
        if self.clip is not None:
            q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))
        if norms is not None and self.norms_heads and not self.rotates_first:
            q, k = norms[0](q), norms[1](k)
        q, k = self.rotated(q, at), self.rotated(k, at)
        if norms is not None and self.rotates_first:
            q, k = norms[0](q), norms[1](k)
        return self.attend_heads(q, k, v, at, kept)

    def rotated(self, x_BSND: Tensor, at: Pass) -> Tensor:
        """Return queries or keys with the rotary embedding of their positions, if this layer has one."""
        if self.rotary is None:
            return x_BSND
        cos, sin = self.tables(at, self.rotary)
        return self.rotate(x_BSND, (cos, sin), self.interleaves)

    def tables(self, at: Pass, place: int) -> PositionTables:
        """Return the tables at a place of `at.rotary` for this rank's sequences."""
        found = at.rotary[place]
        return found if at.documents is None else tuple(at.rows(each, self.tokens) for each in found)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, kept: KeptResult | None) -> Tensor:
        """Return attention's output [M, F] for queries [B, S, N, D], keys and values [B, S, G, D]."""
        q = q if self.query_scale == 1 else q * self.query_scale
        if self.has_temperature:
            q = (q * self.tables(at, -1)[0]).to(q.dtype)
        if self.logits is not None and torch.is_grad_enabled():
            self.logits.record(self.site, self.largest_logits(q.detach(), k.detach(), at))
        softmax = self.softmax(q)
        among_ranks = partial(ContextAttention, self.heads.comm, at.order, self.heads, at.seq_length, softmax=softmax)
        if at.cached and self.context:
            inputs = among_ranks(Visible(None, self.window))
            return cached_context_attention(q, k, v, inputs, at.cached, self.site)
        if at.cached:
            k, v, mask_BST = at.cached.extend(self.site, k, v, self.window)
            return attention(q, k, v, self.heads, None, mask_BST, softmax=softmax)
        drop = None
        if self.dropout and at.key is not None:
            first, _ = at.order.sequences(at.num_sequences, self.tokens)
            drop = Drop(self.dropout, derive_seed(*at.key, self.site), at.first_sequence + first)
        visible = at.visible(self.window, self.tokens)
        if self.context:
            inputs = among_ranks(visible or Visible(), drop, kept=kept, held=at.held_by(self.tokens))
            return context_attention(q, k, v, self.exchange, inputs)
        return attention(q, k, v, self.heads, drop, visible=visible, softmax=softmax)

    def largest_logits(self, q: Tensor, k: Tensor, at: Pass) -> Tensor:
        """Return the largest logit [N] of each head of queries [B, S, N, D] and keys [B, S, G, D]."""
        visible = at.visible(self.window, self.tokens) or Visible()
        positions: list[Sequence[int]] = [range(at.seq_length)]
        k_BGSD, held, rank = k.transpose(1, 2), at.held_by(self.tokens), at.order.mesh.index(self.context)
        if self.context:
            inputs = ContextAttention(self.heads.comm, at.order, self.heads, at.seq_length, visible, held=held)
            k_BGSD = gather_positions(k, self.context, inputs.all_positions, self.heads.comm)
            chunks = [at.order.chunks(at.seq_length)] if held is None else [each[rank] for each in held.chunks]
            positions = [[place for chunk in each for place in range(*chunk)] for each in chunks]
        return largest_logits(q.transpose(1, 2), k_BGSD[:, self.heads.group_of_query], positions, visible)

    def softmax(self, q: Tensor) -> Softmax:
        """Return how the scores of queries [B, S, N, D] become weights."""
        sinks = q.new_zeros(q.shape[2]) if self.has_sinks and self.sinks is None else self.sinks
        return Softmax(self.softcap, sinks)


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.1).

        c, k_pos = W_down x        k = [W_k norm(c), rotate(k_pos)]        v = W_v norm(c)
        q = W_q x, or W_q norm(W_down x) with a latent of its own; its last features are rotated
        the output may be multiplied by sigmoid(W_gate x)

    All heads share the rotary key.  Generation caches c and the rotary key alone, but on context ranks keys and values.
    """

    def add_projections(self, layer: str, build: Build) -> None:
        arch, name, features = build.arch, f"{layer}.attention", build.mode.residual[1]
        assert arch.kv_lora_rank is not None, "keys and values have a latent"
        self.down = Linear(layer, DOWN, build)
        self.q_norm = Norm(f"{name}.q_norm", features, build) if arch.q_lora_rank else None
        self.kv_norm = Norm(f"{name}.kv_norm", features, build)
        self.q_up = Linear(layer, Q_UP, build)
        self.kv_up = Linear(layer, KV_UP, build)
        self.gate_proj = Linear(layer, GATE, build) if arch.attention_output_gate else None
        ranks = build.comm.mesh.size(features)
        self.widths = [size // ranks for size in layer_linears(arch)[DOWN].outputs.values()]
        self.plan, self.comm = build.plan(build.mode.expand), build.comm
        self.sizes = arch.qk_head_dim, arch.qk_pos_emb_head_dim, arch.v_head_dim
        self.scale = arch.query_scale * arch.kv_channels**-0.5
        self.recomputes_up = build.recompute.recomputes(MLA_UP_PROJ)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        with at.reads_input():
            *q_MR, c_MR, k_MP = self.down(x_MH).split(self.widths, dim=1)
        c_MR = self.kv_norm(c_MR.contiguous())
        x_MR = x_MH if self.q_norm is None else self.q_norm(q_MR[0].contiguous())
        if at.cached and not self.context:
            values_MF = self.attend_latents(self.q_up(x_MR), c_MR, k_MP, at, at.cached)
        else:
            values_MF = self.from_latents(x_MR, c_MR, whole_features(k_MP, self.plan, self.comm), at)
        if self.gate_proj is not None:
            with at.reads_input():
                gate_MF = self.gate_proj(x_MH)
            values_MF = values_MF * gate_MF.sigmoid()
        y_MH: Tensor = self.proj(values_MF)
        return y_MH

    def from_latents(self, x_MR: Tensor, c_MR: Tensor, k_MP: Tensor, at: Pass) -> Tensor:
        """Return attention's output [M, F] from what queries are projected of, the latent, and the rotary key."""
        with at.reads_input():
            if self.recomputes_up and not at.cached:
                return recomputed_attention(self.project_up, x_MR, c_MR, k_MP, at.saving(None))
            q_MF = self.q_up(x_MR)
        attend_up = partial(recomputed_attention, self.attend_up) if self.recomputes_core else self.attend_up
        y_MF: Tensor = attend_up(q_MF, self.kv_up(c_MR), k_MP, at)
        return y_MF

    def project_up(self, x_MR: Tensor, c_MR: Tensor, k_MP: Tensor, at: Pass, kept: KeptResult) -> Tensor:
        """Return what `from_latents` does, in one function that is recomputed."""
        return self.attend_up(self.q_up(x_MR), self.kv_up(c_MR), k_MP, at, kept)

    def attend_up(self, q_MF: Tensor, kv_MF: Tensor, k_MP: Tensor, at: Pass, kept: KeptResult | None = None) -> Tensor:
        """Return attention's output [M, F]; keys and values are projected up, and shorter heads padded with zeros."""
        size, length, values = self.heads.size, at.local_length, self.sizes[-1]
        q, q_pos = self.queries(q_MF, at)
        num_heads = q.shape[2]
        k_MF, v_MF = kv_MF.split((num_heads * self.sizes[0], num_heads * values), dim=1)
        k, v = (t.reshape(-1, length, num_heads, t.shape[1] // num_heads) for t in (k_MF, v_MF))
        k_pos = self.rotated(k_MP.view(-1, length, 1, k_MP.shape[1]), at).expand(-1, -1, num_heads, -1)
        q, k = torch.cat((q, q_pos), dim=-1), torch.cat((k, k_pos), dim=-1)
        y_MF = self.attend_heads(padded(q, size), padded(k, size), padded(v, size), at, kept)
        return y_MF if size == values else y_MF.unflatten(1, (num_heads, size))[..., :values].flatten(1).contiguous()

    def queries(self, q_MF: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """Return this rank's queries without positions and rotated ones, each [B, S, N, D]."""
        plain, pos, _ = self.sizes
        q, q_pos = q_MF.view(-1, at.local_length, q_MF.shape[1] // (plain + pos), plain + pos).split(
            (plain, pos), dim=-1
        )
        return q, self.rotated(q_pos, at)

    def attend_latents(self, q_MF: Tensor, c_MR: Tensor, k_MP: Tensor, at: Pass, cached: CacheView) -> Tensor:
        """Return attention's output [M, F] of new tokens to all cached latents, extended by theirs."""
        plain, _, values = self.sizes
        q, q_pos = self.queries(q_MF, at)
        whole = (whole_features(each, self.plan, self.comm) for each in (c_MR, k_MP))
        c, k_pos = (each.view(-1, at.local_length, 1, each.shape[1]) for each in whole)
        new_BSR = torch.cat((c, self.rotated(k_pos, at)), dim=-1).squeeze(2)
        latents_BLR, _, mask_BSL = cached.extend(self.site, new_BSR, new_BSR[..., :0], self.window)
        rows = whole_weight(self.kv_up.weight, self.plan, self.comm).split((q.shape[2] * plain, q.shape[2] * values))
        weights = tuple(part.unflatten(0, (q.shape[2], -1)) for part in rows)
        y = absorbed_attention((q, q_pos), latents_BLR, (weights[0], weights[1]), mask_BSL, self.scale, self.softmax(q))
        return y.flatten(0, 1).flatten(1)


class Layer(nn.Module):
    """Transformer layer [M, H] -> [M, H], of the kind of this index in the whole model.

    The MLP reads the residual stream after attention, or, with a parallel residual, the same one as attention, which
    one norm of both may normalize.
    """

    def __init__(self, index: int, build: Build, path: str | None = None) -> None:
        super().__init__()
        name = path or f"layers.{index}"

        def norm(site: str) -> nn.Module:
            has_one = site in build.arch.norm_sites
            return Norm(f"{name}.{site}", build.mode.residual[1], build) if has_one else nn.Identity()

        self.mlp_input, self.residual_scale = build.arch.mlp_input, build.arch.residual_scale
        self.input_norm = norm("input_norm")
        self.attention = (LatentAttention if build.arch.is_latent else Attention)(index, name, build)
        self.attention_dropout = HiddenDropout(f"{name}.attention.proj", build)
        self.attention_output_norm = norm("attention_output_norm")
        self.post_attention_norm = norm("post_attention_norm")
        self.mlp = MoE(index, name, build) if has_experts(build.arch, index) else MLP(name, build, within=(DENSE_MLP,))
        self.mlp_output_norm = norm("mlp_output_norm")
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.fc2", build)
        self.recomputes_norms = build.recompute.recomputes(LAYERNORM)

    def again(self, norm: nn.Module, x_MH: Tensor, y_MH: Tensor) -> OutputAgain | None:
        """Return what recomputes the output of a norm for those that would save it; None where nothing does."""
        is_again = self.recomputes_norms and torch.is_grad_enabled() and not isinstance(norm, nn.Identity)
        return OutputAgain(norm, x_MH, y_MH) if is_again else None

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        normed_MH = self.input_norm(x_MH)
        again = self.again(self.input_norm, x_MH, normed_MH)
        y_MH = self.attention_output_norm(self.attention(normed_MH, at.saving(again)))
        sum_MH = x_MH.add(self.attention_dropout(y_MH, at), alpha=self.residual_scale)
        input_MH = (x_MH, normed_MH, sum_MH)[self.mlp_input]
        del y_MH, normed_MH  # their memory, where the MLP reads another input
        normed_MH = self.post_attention_norm(input_MH)
        shared = again if self.mlp_input == 1 else None
        again = self.again(self.post_attention_norm, input_MH, normed_MH) or shared
        y_MH = self.mlp_output_norm(self.mlp(normed_MH, at.saving(again)))
        z_MH: Tensor = sum_MH.add(self.mlp_dropout(y_MH, at), alpha=self.residual_scale)
        return z_MH


def is_opaque(module: nn.Module, packs_documents: bool = False) -> bool:
    """Return whether the compiler leaves a module out of the graph: it communicates, or differs in each step.

    `packs_documents`: attention is limited to documents, whose lengths differ.
    """
    if packs_documents and isinstance(module, Attention):
        return True
    return any(isinstance(module, kind) and is_one(module) for kind, is_one in _OPAQUE.items())


_OPAQUE: Mapping[type[nn.Module], Callable[[Any], bool]] = {
    Linear: lambda m: not m.matmul.is_plain,
    Norm: lambda m: bool(m.axes) or m.kernels is not TORCH_NORMS,
    HiddenDropout: lambda m: m.rate > 0,
    Attention: lambda m: (
        m.dropout > 0
        or m.window is not None
        or m.softcap is not None
        or m.has_sinks
        or m.recomputes_core
        or bool(m.heads.gather_axes or m.context)
    ),
    LatentAttention: lambda m: bool(m.plan.k or m.plan.n),
    MLP: lambda m: (
        m.recomputes_all or (m.recomputes_activation and not (m.fc1.matmul.is_plain and m.fc2.matmul.is_plain))
    ),
    MoE: lambda m: True,
}
