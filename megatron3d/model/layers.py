"""Modules of a GPT layer for every layout: a module names its matmul plans and layouts, and `ops` communicates.

The residual stream is [tokens, hidden] in `mode.residual`, the inner stream [tokens, features] in `mode.inner`.
Letters: M tokens, H hidden, F inner features, B sequences, S positions, N heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron3d.comm.interface import Comm
from megatron3d.model.architecture import Architecture
from megatron3d.model.layer_kinds import attention_kind, rotaries
from megatron3d.model.linears import FC1, FC2, PROJ, QKV, layer_linears
from megatron3d.model.microbatch import Pass
from megatron3d.model.recompute_spec import CORE_ATTN, MLP_ACT, NO_RECOMPUTE, Recompute
from megatron3d.ops.activations import ACTIVATIONS
from megatron3d.ops.async_matmul import AsyncMatmul
from megatron3d.ops.attention import AttentionHeads, attention
from megatron3d.ops.compiled_matmul import CompiledLinears
from megatron3d.ops.context_attention import ContextAttention, context_attention
from megatron3d.ops.dropout import dropout, keep_mask
from megatron3d.ops.main_grad import MainGrads
from megatron3d.ops.matmul import Matmul
from megatron3d.ops.norm import TORCH_NORMS, NormKernels, norm
from megatron3d.ops.packed_attention import Visible
from megatron3d.ops.panelled_matmul import PanelledMatmul, PanelledWeight
from megatron3d.ops.recompute import recompute_from_input, recomputed
from megatron3d.ops.rotary import rotate
from megatron3d.ops.seeds import derive_seed
from megatron3d.ops.weight_prefetch import PrefetchedWeight
from megatron3d.ops.wgrad_queue import WgradQueue
from megatron3d.parallel.context import CONTEXT_EXCHANGES
from megatron3d.parallel.layout import ParamSpec, span
from megatron3d.parallel.matmul_plan import MatmulPlan
from megatron3d.parallel.mesh import Axes
from megatron3d.parallel.modes.mode import Mode
from megatron3d.parallel.tp_overlap import OVERLAP_ALL, TPOverlap


@dataclass(frozen=True)
class Build:
    """Arguments of every module's constructor.

    Attributes:
        wgrads: defers weight gradients, or overlaps their reductions; None: linears compute them in backward.
        compiled: operators of linears inside compiled graphs; None: layers are not compiled.
        context_exchange: exchange of keys and values between context ranks.
    """

    arch: Architecture
    mode: Mode
    comm: Comm
    specs: Mapping[str, ParamSpec]
    main_grads: MainGrads
    wgrads: WgradQueue | None = None
    recompute: Recompute = NO_RECOMPUTE
    overlap: TPOverlap = OVERLAP_ALL
    norm_kernels: NormKernels = TORCH_NORMS
    compiled: CompiledLinears | None = None
    context_exchange: str = CONTEXT_EXCHANGES[0]

    def plan(self, plan: MatmulPlan) -> MatmulPlan:
        """Return the plan without axes of size 1."""
        return plan.on(self.comm.mesh)

    def live(self, axes: Axes) -> Axes:
        """Return the axes of more than one rank."""
        return self.comm.mesh.nontrivial(axes)

    def param(self, name: str) -> nn.Parameter:
        """Return a parameter of the table, without memory: `zero.Buffers` allocates it."""
        return nn.Parameter(torch.empty(self.specs[name].local_shape(self.comm.mesh), device="meta"))

    def optional(self, name: str) -> nn.Parameter | None:
        """Return a parameter of the table, None where the table has none."""
        return self.param(name) if name in self.specs else None


class Linear(nn.Module):
    """Tensor-parallel linear [M, K] -> [M, N] with its weight and bias, computed by a matmul plan."""

    def __init__(self, layer: str, name: str, build: Build) -> None:
        super().__init__()
        plan = build.plan(layer_linears(build.arch)[name].plan(build.mode))
        comm, overlap = build.comm, build.overlap
        name = f"{layer}.{name}"
        self.weight = build.param(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.matmul: Matmul
        if overlap.num_panels > 1:
            sliced = PanelledWeight(lambda: self.weight, plan, comm, overlap) if plan.w else None
            self.matmul = PanelledMatmul(plan, comm, overlap, build.main_grads, build.wgrads, sliced)
        else:
            weight = PrefetchedWeight(lambda: self.weight, plan, comm, overlap) if plan.w else None
            compiled = build.compiled.linear(lambda: self.weight) if build.compiled else None
            kind = AsyncMatmul if overlap.in_rounds else Matmul
            self.matmul = kind(plan, comm, overlap, build.main_grads, build.wgrads, weight, compiled)

    def forward(self, x_MK: Tensor) -> Tensor:
        return self.matmul(x_MK, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm of [M, H] over features that `axes` shard."""

    def __init__(self, name: str, axes: Axes, build: Build) -> None:
        super().__init__()
        self.axes, self.comm = build.live(axes), build.comm
        self.eps, self.is_centred_at_0 = build.arch.norm_epsilon, build.arch.apply_layernorm_1p
        self.kernels = build.norm_kernels
        self.weight = build.param(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")

    def forward(self, x_MH: Tensor) -> Tensor:
        weight = self.weight + 1 if self.is_centred_at_0 else self.weight
        return norm(x_MH, weight, self.bias, self.eps, self.axes, self.comm, self.kernels)


class HiddenDropout(nn.Module):
    """Dropout on the residual stream [M, H], with the same mask in every layout."""

    def __init__(self, site: str, build: Build) -> None:
        super().__init__()
        self.site, self.rate = site, build.arch.hidden_dropout
        self.hidden_size = build.arch.hidden_size
        self.layout, self.mesh = build.mode.residual, build.comm.mesh

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        if self.rate == 0 or at.key is None:
            return x_MH
        rows = at.token_rows(self.layout[0], x_MH.device)
        columns = torch.arange(*span(self.hidden_size, self.layout[1], self.mesh), device=x_MH.device)
        return dropout(x_MH, keep_mask(derive_seed(*at.key, self.site), rows, columns, self.rate), self.rate)


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
        self.has_gate = arch.attention_output_gate
        self.proj = Linear(layer, PROJ, build)
        self.recomputes_core = build.recompute.recomputes(CORE_ATTN)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        qkv_MF = self.qkv(x_MH)
        y_MF: Tensor = self.proj(recomputed(self.core, qkv_MF, at) if self.recomputes_core else self.core(qkv_MF, at))
        return y_MF

    def core(self, qkv_MF: Tensor, at: Pass) -> Tensor:
        """Return the input [M, F] of the output projection: core attention over the output of qkv [M, F]."""
        if not self.has_gate:
            return self.attend(qkv_MF, at)
        size = (self.heads.query_span[1] - self.heads.query_span[0]) * self.heads.size
        qkv_MF, gate_MF = qkv_MF.split((qkv_MF.shape[1] - size, size), dim=1)
        y_MF: Tensor = self.attend(qkv_MF, at) * gate_MF.sigmoid()
        return y_MF

    def attend(self, qkv_MF: Tensor, at: Pass) -> Tensor:
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
        if at.cached:
            k, v = at.cached.extend(self.site, k, v)
            return attention(q, k, v, self.heads, None, at.cached.mask_BSL(self.window))
        drop = None
        if self.dropout and at.key is not None:
            first, _ = at.order.sequences(at.num_sequences, self.tokens)
            drop = (self.dropout, derive_seed(*at.key, self.site), at.first_sequence + first)
        visible = at.visible(self.window, self.tokens)
        if self.context:
            seen = visible or Visible()
            inputs = ContextAttention(self.heads.comm, at.order, self.heads, at.seq_length, seen, drop)
            return context_attention(q, k, v, self.exchange, inputs)
        return attention(q, k, v, self.heads, drop, visible=visible)


class MLP(nn.Module):
    """MLP [M, H] -> [M, H]: up (and gate) projection, activation, down projection."""

    def __init__(self, layer: str, build: Build) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[build.arch.activation]
        self.fc1 = Linear(layer, FC1, build)
        self.fc2 = Linear(layer, FC2, build)
        self.recomputes_activation = build.recompute.recomputes(MLP_ACT)

    def forward(self, x_MH: Tensor) -> Tensor:
        y_MF = self.fc1(x_MH)
        a_MF = self.activation(y_MF)
        with recompute_from_input(self.activation, y_MF, a_MF) if self.recomputes_activation else nullcontext():
            y_MH: Tensor = self.fc2(a_MF)
        return y_MH


class Layer(nn.Module):
    """Transformer layer [M, H] -> [M, H], the one of this index in the whole model."""

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        name = f"layers.{index}"

        def norm(site: str) -> nn.Module:
            has_one = site in build.arch.norm_sites
            return Norm(f"{name}.{site}", build.mode.residual[1], build) if has_one else nn.Identity()

        self.input_norm = norm("input_norm")
        self.attention = Attention(index, name, build)
        self.attention_dropout = HiddenDropout(f"{name}.attention.proj", build)
        self.attention_output_norm = norm("attention_output_norm")
        self.post_attention_norm = norm("post_attention_norm")
        self.mlp = MLP(name, build)
        self.mlp_output_norm = norm("mlp_output_norm")
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.fc2", build)

    def forward(self, x_MH: Tensor, at: Pass) -> Tensor:
        y_MH = self.attention_output_norm(self.attention(self.input_norm(x_MH), at))
        x_MH = x_MH + self.attention_dropout(y_MH, at)
        y_MH = self.mlp_output_norm(self.mlp(self.post_attention_norm(x_MH)))
        z_MH: Tensor = x_MH + self.mlp_dropout(y_MH, at)
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
        m.dropout > 0 or m.window is not None or m.recomputes_core or bool(m.heads.gather_axes or m.context)
    ),
    MLP: lambda m: m.recomputes_activation,
}
