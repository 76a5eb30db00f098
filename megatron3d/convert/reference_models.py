"""Reference forward passes of Hugging Face models, as in their papers, from a file's tensors: slow, obvious, float64.

GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023, arXiv:2302.13971), Mistral without a window (Jiang et al. 2023,
arXiv:2310.06825) and Qwen3 (Yang et al. 2025, arXiv:2505.09388), which normalizes queries and keys.  They have no
code in common with our model or the table of names, so they test both; the tensors of one layer are in memory.
Letters: B sequences, S positions, H hidden, N heads, D features of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.convert.model_types import HubConfig

Weights = Callable[[str], Tensor]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def _causal(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt D) v over earlier positions, with heads concatenated: [B, S, N * D]."""
    seq, size = q_BNSD.shape[-2:]
    scores = q_BNSD @ k_BNSD.transpose(-1, -2) / size**0.5
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    y_BNSD: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ v_BNSD
    return y_BNSD.transpose(1, 2).flatten(2)


def gpt2_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of GPT-2."""
    hidden, heads = _int(hf, "n_embd", 768), _int(hf, "n_head", 12)
    eps = _float(hf, "layer_norm_epsilon", 1e-5)
    activation = _ACTIVATIONS[str(hf.get("activation_function", "gelu_new"))]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (hidden,), weights(f"{name}.weight"), weights(f"{name}.bias"), eps)

    def conv(x: Tensor, name: str) -> Tensor:
        return x @ weights(f"{name}.weight") + weights(f"{name}.bias")

    table = "transformer.wte.weight"
    x = F.embedding(tokens_BS, weights(table)) + weights("transformer.wpe.weight")[: tokens_BS.shape[1]]
    for layer in range(_int(hf, "n_layer", 12)):
        name = f"transformer.h.{layer}"
        qkv = conv(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").split(hidden, dim=2)
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv)
        x = x + conv(_causal(q, k, v), f"{name}.attn.c_proj")
        x = x + conv(activation(conv(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")), f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights(table if hf.get("tie_word_embeddings", True) else "lm_head.weight").T


def llama_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of Llama."""
    hidden, heads = _int(hf, "hidden_size", 4096), _int(hf, "num_attention_heads", 32)
    eps = _float(hf, "rms_norm_eps", 1e-6)
    groups, size = _int(hf, "num_key_value_heads", heads), _int(hf, "head_dim", hidden // heads)
    activation = _ACTIVATIONS[str(hf.get("hidden_act", "silu"))]
    rates, scale = _rotary_rates(hf, size)
    angles = torch.outer(torch.arange(tokens_BS.shape[1]), torch.tensor(rates, dtype=torch.float64))
    turn = torch.polar(torch.tensor(scale, dtype=torch.float64), angles)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights(f"{name}.weight")

    def linear(x: Tensor, name: str, has_bias: bool) -> Tensor:
        return F.linear(x, weights(f"{name}.weight"), weights(f"{name}.bias") if has_bias else None)

    def rotated(x_BNSD: Tensor) -> Tensor:
        """Rotate channels i and i + D/2, as real and imaginary parts."""
        turned = torch.complex(*x_BNSD.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = F.embedding(tokens_BS, weights("model.embed_tokens.weight"))
    norms_heads = hf.get("model_type") == "qwen3"
    in_attention, in_mlp = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
    for layer in range(_int(hf, "num_hidden_layers", 32)):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        parts = (linear(y, f"{name}.self_attn.{part}_proj", in_attention) for part in "qkv")
        q, k, v = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)
        if norms_heads:
            q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        x = x + linear(_causal(rotated(q), rotated(k), v), f"{name}.self_attn.o_proj", in_attention)
        y = norm(x, f"{name}.post_attention_layernorm")
        y = activation(linear(y, f"{name}.mlp.gate_proj", in_mlp)) * linear(y, f"{name}.mlp.up_proj", in_mlp)
        x = x + linear(y, f"{name}.mlp.down_proj", in_mlp)
    tied = hf.get("tie_word_embeddings", False)
    return norm(x, "model.norm") @ weights("model.embed_tokens.weight" if tied else "lm_head.weight").T


def _rotary_rates(hf: HubConfig, size: int) -> tuple[list[float], float]:
    """Return the radians per position of each pair of channels, and the factor of queries and keys."""
    described = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = described if isinstance(described, dict) else {}
    base = _float(rope if "rope_theta" in rope else hf, "rope_theta", 10000.0)
    rates = [math.pow(base, -2 * pair / size) for pair in range(size // 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rates, 1.0
    factor = _float(rope, "factor", 1.0)
    length = _float(rope, "original_max_position_embeddings", _float(hf, "max_position_embeddings", 2048))
    slow, fast = _float(rope, "beta_slow", 1.0), _float(rope, "beta_fast", 32.0)
    low, high = _float(rope, "low_freq_factor", 1.0), _float(rope, "high_freq_factor", 4.0)

    def pair_of(rotations: float) -> float:
        """Return which pair of channels turns so often within the original length."""
        return size / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    def share(pair: int) -> float:
        """Return the share of the unscaled rate."""
        if kind == "llama3":
            return (length * rates[pair] / (2 * math.pi) - low) / (high - low)
        first, last = pair_of(fast), pair_of(slow)
        if rope.get("truncate") is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        return 1 - (pair - first) / (last - first or 0.001)

    shares = [0.0 if kind == "linear" else min(max(share(pair), 0.0), 1.0) for pair in range(size // 2)]
    scaled = [rate * (each + (1 - each) / factor) for rate, each in zip(rates, shares, strict=True)]
    default = 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * _float(rope, name, 1.0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        default = above / below
    return scaled, _float(rope, "attention_factor", default)


def mistral_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of Mistral without a window."""
    return llama_logits({"num_key_value_heads": 8, **hf}, weights, tokens_BS)


def qwen3_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of Qwen3."""
    return llama_logits({"num_key_value_heads": 32, "head_dim": 128, **hf}, weights, tokens_BS)


REFERENCE_LOGITS: Mapping[str, Callable[[HubConfig, Weights, Tensor], Tensor]] = {
    "gpt2": gpt2_logits,
    "llama": llama_logits,
    "mistral": mistral_logits,
    "qwen3": qwen3_logits,
}


def _int(hf: HubConfig, name: str, default: int) -> int:
    value = hf.get(name)
    return value if isinstance(value, int) else default


def _float(hf: HubConfig, name: str, default: float) -> float:
    value = hf.get(name)
    return float(value) if isinstance(value, int | float) else default
