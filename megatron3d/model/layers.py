"""Modules of a GPT layer for every layout: a module names its matmul plans and layouts, and `ops` communicates.

The residual stream is [tokens, hidden] in `mode.residual`, the inner stream [tokens, features] in `mode.inner`.
Letters: M tokens, H hidden, F inner features, B sequences, S positions, N heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from megatron3d.model.experts import MoE
from megatron3d.model.layer_kinds import attention_kind, has_experts, rotaries
from megatron3d.model.linears import PROJ, QKV
from megatron3d.model.microbatch import Pass
from megatron3d.model.mlp import MLP
from megatron3d.model.modules import Build, HiddenDropout, Linear, Norm
from megatron3d.model.recompute_spec import CORE_ATTN
from megatron3d.ops.attention import AttentionHeads, attention
from megatron3d.ops.attention_softmax import VANILLA, Softmax
from megatron3d.ops.cached_context_attention import cached_context_attention
from megatron3d.ops.context_attention import ContextAttention, KeptResult, context_attention
from megatron3d.ops.norm import TORCH_NORMS
from megatron3d.ops.packed_attention import Visible
from megatron3d.ops.recompute import recomputed
from megatron3d.ops.rotary import rotate
from megatron3d.ops.seeds import derive_seed


class Attention(nn.Module):
    """Self-attention [M, H] -> [M, H]: qkv, rotary embedding, attention over this rank's heads, output projection."""

    def __init__(self, index: int, layer: str, build: Build) -> None:
        super().__init__()
        arch, name = build.arch, f"{layer}.attention"
        kind = attention_kind(arch, index)
        self.window, rotary = kind.window, kind.rotary
        self.rotary = None if rotary is None else rotaries(arch).index(rotary)
        self.site, self.dropout = name, arch.attention_dropout
        self.query_scale = 1.0 if arch.softmax_scale is None else arch.softmax_scale * arch.kv_channels**0.5
        self.tokens, self.context = build.mode.inner[0], build.mode.context
        self.exchange = build.context_exchange
        heads_axes = build.live(build.mode.inner[1])
        self.heads = AttentionHeads(
            arch.num_attention_heads, arch.num_query_groups, arch.kv_channels, heads_axes, build.comm
        )
        self.qkv = Linear(layer, QKV, build)
        self.norms_heads = arch.qk_layernorm_scope == "head"
        norm_axes = () if self.norms_heads else build.mode.inner[1]
        self.q_norm = Norm(f"{name}.q_norm", norm_axes, build) if arch.qk_layernorm else None
        self.k_norm = Norm(f"{name}.k_norm", norm_axes, build) if arch.qk_layernorm else None
        self.softcap, self.has_sinks = arch.attention_softcap, arch.softmax_type != VANILLA
        self.sinks = build.optional(f"{name}.sinks")
        self.has_gate = arch.attention_output_gate
        self.proj = Linear(layer, PROJ, build)
        self.recomputes_core = build.recompute.recomputes(CORE_ATTN)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        qkv_MF = self.qkv(x_MH)
        args = (qkv_MF, at, KeptResult()) if self.recomputes_core else (qkv_MF, at)
        y_MF: Tensor = self.proj(recomputed(self.core, *args) if self.recomputes_core else self.core(*args))
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
        if norms is not None and self.norms_heads:
            q, k = norms[0](q), norms[1](k)
        if self.rotary is not None:
            cos, sin = tables = at.rotary[self.rotary]
            if at.documents is not None:
                tables = at.rows(cos, self.tokens), at.rows(sin, self.tokens)
            q, k = rotate(q, tables), rotate(k, tables)
        q = q if self.query_scale == 1 else q * self.query_scale
        sinks = q.new_zeros(q.shape[2]) if self.has_sinks and self.sinks is None else self.sinks
        softmax = Softmax(self.softcap, sinks)
        if at.cached and self.context:
            seen = Visible(None, self.window)
            inputs = ContextAttention(self.heads.comm, at.order, self.heads, at.seq_length, seen, None, softmax)
            return cached_context_attention(q, k, v, inputs, at.cached, self.site)
        if at.cached:
            k, v = at.cached.extend(self.site, k, v)
            return attention(q, k, v, self.heads, None, at.cached.mask_BSL(self.window), softmax=softmax)
        drop = None
        if self.dropout and at.key is not None:
            first, _ = at.order.sequences(at.num_sequences, self.tokens)
            drop = (self.dropout, derive_seed(*at.key, self.site), at.first_sequence + first)
        visible = at.visible(self.window, self.tokens)
        if self.context:
            seen = visible or Visible()
            inputs = ContextAttention(self.heads.comm, at.order, self.heads, at.seq_length, seen, drop, softmax, kept)
            return context_attention(q, k, v, self.exchange, inputs)
        return attention(q, k, v, self.heads, drop, visible=visible, softmax=softmax)


class Layer(nn.Module):
    """Transformer layer [M, H] -> [M, H], of the kind of this index in the whole model.

    The MLP reads the residual stream after attention, or, with a parallel residual, the same one as attention.
    """

    def __init__(self, index: int, build: Build, path: str | None = None) -> None:
        super().__init__()
        name = path or f"layers.{index}"

        def norm(site: str) -> nn.Module:
            has_one = site in build.arch.norm_sites
            return Norm(f"{name}.{site}", build.mode.residual[1], build) if has_one else nn.Identity()

        self.is_parallel = build.arch.use_parallel_residual
        self.input_norm = norm("input_norm")
        self.attention = Attention(index, name, build)
        self.attention_dropout = HiddenDropout(f"{name}.attention.proj", build)
        self.attention_output_norm = norm("attention_output_norm")
        self.post_attention_norm = norm("post_attention_norm")
        self.mlp = MoE(index, name, build) if has_experts(build.arch, index) else MLP(name, build)
        self.mlp_output_norm = norm("mlp_output_norm")
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.fc2", build)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        y_MH = self.attention_output_norm(self.attention(self.input_norm(x_MH), at))
        sum_MH = x_MH + self.attention_dropout(y_MH, at)
        y_MH = self.mlp(self.post_attention_norm(x_MH if self.is_parallel else sum_MH), at)
        y_MH = self.mlp_output_norm(y_MH)
        z_MH: Tensor = sum_MH + self.mlp_dropout(y_MH, at)
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
    MLP: lambda m: m.recomputes_activation,
    MoE: lambda m: True,
}
