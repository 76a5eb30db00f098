"""Reference forward passes of Hugging Face models, as in their papers, from a file's tensors: slow, obvious, float64.

GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023, arXiv:2302.13971), and what others compute otherwise.  No code
is in common with our model or the table of names, so that they test both; the tensors of one layer are in memory.
Letters: B sequences, S positions, H hidden, N heads, D features of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.convert.fields import HubConfig
from megatron3d.convert.reference_decoders import DECODERS, Decoder
from megatron3d.convert.reference_experts import first_of, has_router, mixture
from megatron3d.convert.reference_rotary import float_of, int_of, rotated, table_of

Weights = Callable[[str], Tensor]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
}


def _causal(
    q_BNSD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt D) v over earlier positions, with heads concatenated: [B, S, N * D].

    Args:
        scale: factor instead of 1 / sqrt D.
        window: positions that a query sees, its own included.
        cap: c, if scores become c tanh(score / c).
        sinks_N: a logit of each head that joins the denominators of its softmax.
    """
    seq, size = q_BNSD.shape[-2:]
    scores = q_BNSD @ k_BNSD.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    unseen = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    if window is not None:
        unseen |= torch.ones(seq, seq, dtype=torch.bool).tril(-window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks_N is not None:
        scores = torch.cat((scores, sinks_N.view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    y_BNSD: Tensor = scores.softmax(-1)[..., :seq] @ v_BNSD
    return y_BNSD.transpose(1, 2).flatten(2)


def gpt2_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of GPT-2."""
    hidden, heads = int_of(hf, "n_embd", 768), int_of(hf, "n_head", 12)
    eps = float_of(hf, "layer_norm_epsilon", 1e-5)
    activation = _ACTIVATIONS[str(hf.get("activation_function", "gelu_new"))]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (hidden,), weights(f"{name}.weight"), weights(f"{name}.bias"), eps)

    def conv(x: Tensor, name: str) -> Tensor:
        return x @ weights(f"{name}.weight") + weights(f"{name}.bias")

    table = "transformer.wte.weight"
    x = F.embedding(tokens_BS, weights(table)) + weights("transformer.wpe.weight")[: tokens_BS.shape[1]]
    for layer in range(int_of(hf, "n_layer", 12)):
        name = f"transformer.h.{layer}"
        qkv = conv(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").split(hidden, dim=2)
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv)
        x = x + conv(_causal(q, k, v), f"{name}.attn.c_proj")
        x = x + conv(activation(conv(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")), f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights(table if hf.get("tie_word_embeddings", True) else "lm_head.weight").T


def _is_rotated(hf: HubConfig, layer: int) -> bool:
    """Return whether a layer has rotary positions."""
    rotated = hf.get("no_rope_layers")
    if isinstance(rotated, list):
        return bool(rotated[layer])
    return (layer + 1) % int_of(hf, "no_rope_layer_interval", layer + 2) != 0


def _is_sliding(hf: HubConfig, layer: int) -> bool:
    """Return whether a layer has the window, where config.json has one."""
    types = hf.get("layer_types")
    if isinstance(types, list):
        return types[layer] == "sliding_attention"
    if "no_rope_layer_interval" in hf:
        return not _is_rotated(hf, layer)
    if "full_every" in hf:
        return (layer + 1) % int_of(hf, "sliding_window_pattern", int_of(hf, "full_every", 1)) != 0
    return layer >= int_of(hf, "max_window_layers", 0)


class _Decoding:
    """A forward pass of a model like Llama."""

    def __init__(self, hf: HubConfig, weights: Weights, kind: Decoder) -> None:
        caps = {name: 0.0 for name in ("attn_logit_softcapping", "final_logit_softcapping") if hf.get(name, 0) is None}
        self.hf = {**kind.defaults, **{name: value for name, value in hf.items() if value is not None}, **caps}
        self.weights, self.kind = weights, kind
        self.activation = _ACTIVATIONS[str(self.hf.get("hidden_activation", self.hf.get("hidden_act", "silu")))]
        self.in_qkv, self.in_output, self.in_mlp = (
            name is True or bool(name and self.hf.get(name, False)) for name in kind.has_bias
        )

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits [B, S, V]."""
        hf, kind, table = self.hf, self.kind, "model.embed_tokens.weight"
        x = F.embedding(tokens_BS, self.weights(table))
        root = int_of(hf, "hidden_size", 4096) ** 0.5
        x = x * (root if kind.scales_embedding else float_of(hf, "embedding_multiplier", 1.0))
        residual = float_of(hf, "residual_multiplier", 1.0)
        for layer in range(int_of(hf, "num_hidden_layers", 32)):
            name = f"model.layers.{layer}"
            for place in range(2):
                y = self.norm(x, f"{name}.{kind.before[place]}") if kind.before else x
                y = self.inner(y, name) if place else self.attention(y, f"{name}.self_attn", layer)
                x = x + (self.norm(y, f"{name}.{kind.after[place]}") if kind.after else y) * residual
        tied = hf.get("tie_word_embeddings", False)
        logits = self.norm(x, "model.norm") @ self.weights(table if tied else "lm_head.weight").T
        logits = logits / float_of(hf, "logits_scaling", 1.0)
        cap = float_of(hf, "final_logit_softcapping", 0.0)
        return cap * torch.tanh(logits / cap) if cap else logits

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = float_of(self.hf, self.kind.epsilon, 1e-6)
        if self.kind.norm == "plain layer":
            return F.layer_norm(x, x.shape[-1:], None, None, eps)
        weight = self.weights(f"{name}.weight")
        weight = weight + self.kind.norm.endswith("+ 1")
        if self.kind.norm.startswith("layer"):
            return F.layer_norm(x, x.shape[-1:], weight, self.weights(f"{name}.bias"), eps)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def linear(self, x: Tensor, name: str, has_bias: bool) -> Tensor:
        return F.linear(x, self.weights(f"{name}.weight"), self.weights(f"{name}.bias") if has_bias else None)

    def attention(self, x: Tensor, name: str, layer: int) -> Tensor:
        hf, kind = self.hf, self.kind
        if kind.is_latent:
            return self.latent_attention(x, name)
        heads = int_of(hf, "num_attention_heads", 32)
        groups, size = (
            int_of(hf, "num_key_value_heads", heads),
            int_of(hf, "head_dim", int_of(hf, "hidden_size", 4096) // heads),
        )
        if kind.mlp[1] == "gate_up_proj":
            qkv = self.linear(x, f"{name}.qkv_proj", self.in_qkv)
            parts = list(qkv.split([heads * size, groups * size, groups * size], dim=2))
        else:
            parts = [self.linear(x, f"{name}.{part}_proj", self.in_qkv) for part in "qkv"]
        if kind.head_norms == "projection":
            parts[:2] = (self.norm(part, f"{name}.{norm}_norm") for part, norm in zip(parts, "qk", strict=False))
        q, k, v = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)
        if kind.head_norms == "head" and hf.get("use_qk_norm", True):
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        window = int_of(hf, "sliding_window", 0) if hf.get("use_sliding_window", True) else 0
        slides = bool(window) and _is_sliding(hf, layer)
        if _is_rotated(hf, layer):
            q, k = (rotated(part, hf, kind.local_base if slides else "") for part in (q, k))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        scale = (
            float_of(hf, kind.scale, size) ** -0.5 if kind.scale else float_of(hf, "attention_multiplier", size**-0.5)
        )
        cap = float_of(hf, "attn_logit_softcapping", 0.0)
        y = _causal(
            q,
            k,
            v,
            scale,
            window=window if slides else None,
            cap=cap,
            sinks_N=first_of(self.weights, f"{name}.sinks"),
        )
        return self.linear(y, f"{name}.o_proj", self.in_output)

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Return latent attention: heads of keys and values from a normalized latent, and one rotated key for all."""
        hf, heads = self.hf, int_of(self.hf, "num_attention_heads", 128)
        plain, turned = int_of(hf, "qk_nope_head_dim", 128), int_of(hf, "qk_rope_head_dim", 64)
        in_down = bool(hf.get("attention_bias", False))
        if first_of(self.weights, f"{name}.q_a_proj.weight") is None:
            q = self.linear(x, f"{name}.q_proj", False)
        else:
            latent = self.norm(self.linear(x, f"{name}.q_a_proj", in_down), f"{name}.q_a_layernorm")
            q = self.linear(latent, f"{name}.q_b_proj", False)
        down = self.linear(x, f"{name}.kv_a_proj_with_mqa", in_down)
        kv = self.linear(self.norm(down[..., :-turned], f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj", False)
        q, kv, k_pos = (
            t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in ((q, heads), (kv, heads), (down[..., -turned:], 1))
        )
        if hf.get("rope_interleave", True):  # pairs of neighbours; scores do not depend on the order of channels
            q_pos, k_pos = (torch.cat((t[..., 0::2], t[..., 1::2]), -1) for t in (q[..., plain:], k_pos))
        else:
            q_pos = q[..., plain:]
        q_pos, k_pos = (rotated(t, {**hf, "partial_rotary_factor": 1.0}, "") for t in (q_pos, k_pos))
        k = torch.cat((kv[..., :plain], k_pos.expand_as(q_pos)), -1)
        rope = table_of(hf, "rope_parameters") or table_of(hf, "rope_scaling")
        mscale = 0.1 * float_of(rope, "mscale_all_dim", 0.0) * math.log(float_of(rope, "factor", 1.0)) + 1
        y = _causal(torch.cat((q[..., :plain], q_pos), -1), k, kv[..., plain:], (plain + turned) ** -0.5 * mscale**2)
        return self.linear(y, f"{name}.o_proj", self.in_output)

    def inner(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a layer's experts, or of its MLP."""
        if not has_router(self.weights, name):
            return self.mlp(x, f"{name}.mlp")
        return mixture(self.hf, self.weights, x.flatten(0, 1), name, self.activation).view_as(x)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate_name, up_name, down_name = self.kind.mlp
        up = self.linear(x, f"{name}.{up_name}", self.in_mlp)
        if up_name == "gate_up_proj":
            gate, up = up.chunk(2, dim=2)
            y = self.activation(gate) * up
        elif gate_name:
            y = self.activation(self.linear(x, f"{name}.{gate_name}", self.in_mlp)) * up
        else:
            y = self.activation(up)
        return self.linear(y, f"{name}.{down_name}", self.in_mlp)


def decoder_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor, kind: Decoder) -> Tensor:
    """Return the logits [B, S, V] of a model like Llama."""
    return _Decoding(hf, weights, kind).logits(tokens_BS)


def neox_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of GPT-NeoX, whose attention and MLP may read the same residual stream."""
    older = {
        "partial_rotary_factor": float_of(hf, "rotary_pct", 0.25),
        "rope_theta": float_of(hf, "rotary_emb_base", 1e4),
    }
    hf = {**older, **hf}
    heads, eps = int_of(hf, "num_attention_heads", 64), float_of(hf, "layer_norm_eps", 1e-5)
    activation = _ACTIVATIONS[str(hf.get("hidden_act", "gelu"))]
    has_bias = bool(hf.get("attention_bias", True))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights(f"{name}.weight"), weights(f"{name}.bias"), eps)

    def linear(x: Tensor, name: str, has_bias: bool = True) -> Tensor:
        return F.linear(x, weights(f"{name}.weight"), weights(f"{name}.bias") if has_bias else None)

    table = "gpt_neox.embed_in.weight"
    x = F.embedding(tokens_BS, weights(table))
    for layer in range(int_of(hf, "num_hidden_layers", 44)):
        name = f"gpt_neox.layers.{layer}"
        qkv = linear(norm(x, f"{name}.input_layernorm"), f"{name}.attention.query_key_value", has_bias)
        q, k, v = qkv.unflatten(2, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        y = linear(_causal(rotated(q, hf, ""), rotated(k, hf, ""), v), f"{name}.attention.dense", has_bias)
        read = x if hf.get("use_parallel_residual", True) else x + y
        z = linear(norm(read, f"{name}.post_attention_layernorm"), f"{name}.mlp.dense_h_to_4h")
        x = x + y + linear(activation(z), f"{name}.mlp.dense_4h_to_h")
    tied = hf.get("tie_word_embeddings", False)
    return norm(x, "gpt_neox.final_layer_norm") @ weights(table if tied else "embed_out.weight").T


REFERENCE_LOGITS: Mapping[str, Callable[[HubConfig, Weights, Tensor], Tensor]] = {
    "gpt2": gpt2_logits,
    "gpt_neox": neox_logits,
    **{name: partial(decoder_logits, kind=kind) for name, kind in DECODERS.items()},
}
