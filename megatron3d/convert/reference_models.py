"""Reference forward passes of Hugging Face models, as in their papers, from a file's tensors: slow, obvious, float64.

GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023, arXiv:2302.13971), mixtures of experts (Jiang et al. 2024,
arXiv:2401.04088; DeepSeek-AI 2024, arXiv:2412.19437), and what others compute otherwise.  No code is in common with our
model or the table of names, so that they test both; the tensors of one layer are in memory.
Letters: B sequences, S positions, T tokens, H hidden, N heads, D features of a head, V vocabulary, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.convert.fields import HubConfig

Weights = Callable[[str], Tensor]
Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), partial(F.gelu, approximate="tanh")),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
}


def _rotated(x_BNSD: Tensor, hf: HubConfig, local_base: str, turns_neighbours: bool = False) -> Tensor:
    """Rotate channels i and i + R/2 of the first R of each head, as real and imaginary parts.

    Neighbours are put there first where they turn together: scores do not depend on the order of channels.
    """
    described = _table(hf, "rope_parameters")
    if local_base:
        local = _table(described, "sliding_attention")
        theta = _float(local, "rope_theta", _float(hf, local_base, _float(hf, "rope_theta", 10000.0)))
        hf, described = {"rope_theta": theta}, {}
    elif "full_attention" in described:
        described = _table(described, "full_attention")
        hf = {**hf, "rope_parameters": dict(described)}
    share = _float(described, "partial_rotary_factor", _float(hf, "partial_rotary_factor", 1.0))
    size = int(x_BNSD.shape[-1] * share)
    rates, scale = _rotary_rates(hf, size, x_BNSD.shape[2])
    angles = torch.outer(torch.arange(x_BNSD.shape[2]), torch.tensor(rates, dtype=torch.float64))
    turn = torch.polar(torch.tensor(scale, dtype=torch.float64), angles)
    halves = (
        x_BNSD[..., :size].unflatten(-1, (-1, 2)).unbind(-1) if turns_neighbours else x_BNSD[..., :size].chunk(2, -1)
    )
    turned = torch.complex(*halves) * turn
    return torch.cat((turned.real, turned.imag, x_BNSD[..., size:]), dim=-1)


def _rotary_rates(hf: HubConfig, size: int, num_positions: int) -> tuple[list[float], float]:
    """Return the radians per position of each pair of channels, and the factor of queries and keys.

    LongRoPE has one list of divisors up to the original length, and another for longer inputs.
    """
    described = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = described if isinstance(described, dict) else {}
    base = _float(rope if "rope_theta" in rope else hf, "rope_theta", 10000.0)
    if rope.get("alpha"):
        base, rope = base * _float(rope, "alpha", 1.0) ** (size / (size - 2)), {}
    rates = [math.pow(base, -2 * pair / size) for pair in range(size // 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rates, 1.0
    factor = _float(rope, "factor", 1.0)
    positions = _float(hf, "max_position_embeddings", 2048)
    length = _float(rope, "original_max_position_embeddings", positions)
    if kind in ("longrope", "su") or "short_factor" in rope:
        length = _float(hf, "original_max_position_embeddings", 4096)
        divisors = rope["long_factor" if num_positions > length else "short_factor"]
        assert isinstance(divisors, list), "a divisor for each pair"
        above = _float(rope, "factor", positions / length)
        default = math.sqrt(1 + math.log(above) / math.log(length)) if above > 1 else 1.0
        longer = [rate / float(str(each)) for rate, each in zip(rates, divisors, strict=True)]
        return longer, _float(rope, "attention_factor", default)
    slow, fast = _float(rope, "beta_slow", 1.0), _float(rope, "beta_fast", 32.0)
    low, high = _float(rope, "low_freq_factor", 1.0), _float(rope, "high_freq_factor", 4.0)

    def pair_of(rotations: float) -> float:
        """Return which pair of channels turns so often within the original length."""
        return size / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    def share(pair: int) -> float:
        """Return the share of the unscaled rate."""
        if kind == "llama3":
            return (length * rates[pair] / (2 * math.pi) - low) / max(high - low, 1e-30)
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


def _factors_of_queries(hf: HubConfig, num_positions: int, is_rotated: bool) -> Tensor:
    """Return the factors [S, 1] of queries by position."""
    if hf.get("attn_temperature_tuning") and not is_rotated:
        floors = (torch.arange(num_positions) + 1) // int(_float(hf, "floor_scale", 8192))
        return (1 + _float(hf, "attn_scale", 0.1) * torch.log1p(floors.double())).unsqueeze(1)
    rope = _table(hf, "rope_parameters") or _table(hf, "rope_scaling")
    steps = torch.arange(num_positions) // int(_float(rope, "original_max_position_embeddings", 1.0))
    return (1 + _float(rope, "llama_4_scaling_beta", 0.0) * torch.log(1 + steps.double())).unsqueeze(1)


def _int(hf: HubConfig, name: str, default: int) -> int:
    value = hf.get(name)
    return value if isinstance(value, int) else default


def _table(hf: HubConfig, name: str) -> HubConfig:
    value = hf.get(name)
    return value if isinstance(value, dict) else {}


def _float(hf: HubConfig, name: str, default: float) -> float:
    value = hf.get(name)
    return float(value) if isinstance(value, int | float) else default


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


def _mixture(hf: HubConfig, weights: Weights, x_TH: Tensor, layer: str, activation: Activation) -> Tensor:
    """Return the sum of the chosen experts' outputs by their weights, and of the shared experts' output."""
    router = _router(weights, layer)
    assert router is not None, f"{layer} has a router"
    logits_TE = F.linear(x_TH, router, _first(weights, f"{layer}.mlp.router.bias"))
    biases = (f"{layer}.{name}.e_score_correction_bias" for name in ("mlp.gate", "block_sparse_moe", "mlp"))
    chosen, shares = _choice(hf, logits_TE, _first(weights, *biases))
    y_TH = torch.zeros_like(x_TH)
    for expert in chosen.unique().tolist():
        token, slot = torch.nonzero(chosen == expert, as_tuple=True)
        if _first(weights, f"{layer}.mlp.experts.gate_up_proj_bias") is None:
            outputs = _gated(x_TH[token], _expert(weights, layer, expert), activation)
        else:
            outputs = _clamped_expert(weights, f"{layer}.mlp.experts", expert, x_TH[token])
        y_TH.index_add_(0, token, outputs * shares[token, slot].unsqueeze(1))
    for name in ("shared_experts", "shared_expert", "shared_mlp"):
        if _first(weights, f"{layer}.mlp.{name}.gate_proj.weight") is not None:
            parts = [weights(f"{layer}.mlp.{name}.{part}_proj.weight") for part in ("gate", "up", "down")]
            shared_TH = _gated(x_TH, parts, activation)
            share = _first(weights, f"{layer}.mlp.shared_expert_gate.weight")
            y_TH = y_TH + (shared_TH if share is None else F.linear(x_TH, share).sigmoid() * shared_TH)
    return y_TH


_SIGMOID = ("deepseek_v3", "glm4_moe", "minimax_m2")


def _choice(hf: HubConfig, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token and their weights, each [T, K]."""
    is_sigmoid = hf["model_type"] in _SIGMOID
    scores = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    groups, kept = int(str(hf.get("n_group") or 1)), int(str(hf.get("topk_group") or 1))
    if groups > 1 and (is_sigmoid or hf.get("topk_method") == "group_limited_greedy"):
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.sort(-1, descending=True).values[..., : 2 if is_sigmoid else 1].sum(-1).topk(kept).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
    count = hf.get("moe_topk", hf.get("num_experts_per_tok"))
    count = count[0] if isinstance(count, list) else count
    chosen = choice.topk(int(str(count or 8))).indices
    shares = scores.gather(-1, chosen)
    if hf.get("norm_topk_prob", is_sigmoid or hf["model_type"] in ("mixtral", "gpt_oss", "hunyuan_v1_moe")):
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares * float(str(hf.get("routed_scaling_factor") or 1.0))


def _clamped_expert(weights: Weights, name: str, expert: int, x_TH: Tensor) -> Tensor:
    """Return the output of an expert of gpt-oss (OpenAI 2025), whose gate and up columns alternate."""
    both = x_TH @ weights(f"{name}.gate_up_proj")[expert] + weights(f"{name}.gate_up_proj_bias")[expert]
    gate, up = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return inner @ weights(f"{name}.down_proj")[expert] + weights(f"{name}.down_proj_bias")[expert]


def _gated(x_TH: Tensor, parts: Sequence[Tensor], activation: Activation) -> Tensor:
    """Return the output of an MLP of gate, up and down projection."""
    gate, up, down = parts
    return F.linear(activation(F.linear(x_TH, gate)) * F.linear(x_TH, up), down)


def _expert(weights: Weights, layer: str, expert: int) -> list[Tensor]:
    """Return gate, up and down projection of an expert, which files hold in one of three ways."""
    both = _first(weights, f"{layer}.mlp.experts.gate_up_proj")
    if both is not None:
        return [*both[expert].chunk(2), weights(f"{layer}.mlp.experts.down_proj")[expert]]
    named = [f"{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
    if _first(weights, named[0]) is None:
        named = [f"{layer}.block_sparse_moe.experts.{expert}.w{number}.weight" for number in (1, 3, 2)]
    return [weights(name) for name in named]


_ROUTERS = ("mlp.gate", "mlp.gate.wg", "block_sparse_moe.gate", "mlp.router")


def _router(weights: Weights, layer: str) -> Tensor | None:
    return _first(weights, *(f"{layer}.{name}.weight" for name in _ROUTERS))


def _first(weights: Weights, *names: str) -> Tensor | None:
    """Return the first of some tensors that the files have."""
    for name in names:
        try:
            return weights(name)
        except KeyError:
            continue
    return None


def _is_rotated(hf: HubConfig, layer: int) -> bool:
    """Return whether a layer has rotary positions."""
    rotated = hf.get("no_rope_layers")
    if isinstance(rotated, list):
        return bool(rotated[layer])
    return (layer + 1) % _int(hf, "no_rope_layer_interval", layer + 2) != 0


def _is_sliding(hf: HubConfig, layer: int) -> bool:
    """Return whether a layer has the window, where config.json has one."""
    types = hf.get("layer_types")
    if isinstance(types, list):
        return types[layer] == "sliding_attention"
    if "no_rope_layer_interval" in hf:
        return not _is_rotated(hf, layer)
    if "full_every" in hf:
        return (layer + 1) % _int(hf, "sliding_window_pattern", _int(hf, "full_every", 1)) != 0
    return layer >= _int(hf, "max_window_layers", 0)


@dataclass(frozen=True)
class Decoder:
    """What a model type computes otherwise than Llama.

    Attributes:
        defaults: values of absent fields.
        norm: "rms", "rms + 1" (multiplies by 1 + weight), "layer", "layer + 1", or "plain layer" without weights;
            biases are those that files hold.
        epsilon: field of the norms' epsilon.
        before, after: names of the norms on the inputs, and on the outputs, of attention and MLP.
        head_norms: queries and keys are normalized over "head" or "projection", over each head behind their rotation
            ("rotated head", "rotated, without weights"), or not ("").
        mlp: names of the gate (none: ""), of the projection up, and of the one down; "gate_up_proj" holds both.
        has_bias: fields that switch biases on in q, k and v, in attention's output, and in the MLP; True: always.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        scale: field of the number whose inverse root multiplies the scores.
        local_base: rotary base of layers with a window, where they have one of their own.
        is_latent: keys and values come from a latent.
        turns_neighbours: channels 2i and 2i + 1 of a head are rotated together.
        is_parallel: attention and MLP read one norm of a layer's input.
        rotates_windows: only layers with a window have rotary positions.
        mlp_name: name of a layer's MLP, or of its experts.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "rms"
    epsilon: str = "rms_norm_eps"
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    head_norms: str = ""
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_bias: tuple[str | bool, str | bool, str | bool] = ("attention_bias", "attention_bias", "mlp_bias")
    scales_embedding: bool = False
    scale: str = ""
    local_base: str = ""
    is_latent: bool = False
    turns_neighbours: bool = False
    is_parallel: bool = False
    rotates_windows: bool = False
    mlp_name: str = "mlp"


class _Decoding:
    """Forward pass of a model like Llama."""

    def __init__(self, hf: HubConfig, weights: Weights, kind: Decoder) -> None:
        caps = {name: 0.0 for name in ("attn_logit_softcapping", "final_logit_softcapping") if hf.get(name, 0) is None}
        self.hf = {**kind.defaults, **{name: value for name, value in hf.items() if value is not None}, **caps}
        self.weights, self.kind = weights, kind
        named = str(self.hf.get("hidden_activation", self.hf.get("hidden_act", "silu")))
        self.activation = _ACTIVATIONS.get(named, F.silu)
        self.in_qkv, self.in_output, self.in_mlp = (
            name is True or bool(name and self.hf.get(name, False)) for name in kind.has_bias
        )

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits [B, S, V]."""
        hf, kind, table = self.hf, self.kind, "model.embed_tokens.weight"
        x = F.embedding(tokens_BS, self.weights(table))
        root = _int(hf, "hidden_size", 4096) ** 0.5
        x = x * (root if kind.scales_embedding else _float(hf, "embedding_multiplier", 1.0))
        residual = _float(hf, "residual_multiplier", 1.0)
        for layer in range(_int(hf, "num_hidden_layers", 32)):
            name = f"model.layers.{layer}"
            if kind.is_parallel:
                y = self.norm(x, f"{name}.input_layernorm")
                x = x + self.attention(y, f"{name}.self_attn", layer) + self.inner(y, name)
                continue
            for place in range(2):
                y = self.norm(x, f"{name}.{kind.before[place]}") if kind.before else x
                y = self.inner(y, name) if place else self.attention(y, f"{name}.self_attn", layer)
                x = x + (self.norm(y, f"{name}.{kind.after[place]}") if kind.after else y) * residual
        tied = hf.get("tie_word_embeddings", False)
        logits = self.norm(x, "model.norm") @ self.weights(table if tied else "lm_head.weight").T
        logits = logits / _float(hf, "logits_scaling", 1.0) * _float(hf, "logit_scale", 1.0)
        cap = _float(hf, "final_logit_softcapping", 0.0)
        return cap * torch.tanh(logits / cap) if cap else logits

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = _float(self.hf, self.kind.epsilon, 1e-6)
        if self.kind.norm == "plain layer":
            return F.layer_norm(x, x.shape[-1:], None, None, eps)
        weight = self.weights(f"{name}.weight")
        weight = weight + self.kind.norm.endswith("+ 1")
        if self.kind.norm.startswith("layer"):
            return F.layer_norm(x, x.shape[-1:], weight, _first(self.weights, f"{name}.bias"), eps)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def linear(self, x: Tensor, name: str, has_bias: bool) -> Tensor:
        return F.linear(x, self.weights(f"{name}.weight"), self.weights(f"{name}.bias") if has_bias else None)

    def attention(self, x: Tensor, name: str, layer: int) -> Tensor:
        hf, kind = self.hf, self.kind
        if kind.is_latent:
            return self.latent_attention(x, name)
        heads = _int(hf, "num_attention_heads", 32)
        groups = _int(hf, "num_key_value_heads", heads)
        size = _int(hf, "head_dim", _int(hf, "hidden_size", 4096) // heads)
        if _first(self.weights, f"{name}.qkv_proj.weight") is not None:
            qkv = self.linear(x, f"{name}.qkv_proj", self.in_qkv)
            parts = list(qkv.split([heads * size, groups * size, groups * size], dim=2))
        else:
            parts = [self.linear(x, f"{name}.{part}_proj", self.in_qkv) for part in "qkv"]
        if kind.head_norms == "projection":
            parts[:2] = (self.norm(part, f"{name}.{norm}_norm") for part, norm in zip(parts, "qk", strict=False))
        clip = _float(hf, "clip_qkv", math.inf)
        q, k, v = (part.clamp(-clip, clip).unflatten(2, (-1, size)).transpose(1, 2) for part in parts)
        if kind.head_norms == "head" and hf.get("use_qk_norm", True):
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        window = _int(hf, "sliding_window", 0) if hf.get("use_sliding_window", True) else 0
        slides = bool(window) and _is_sliding(hf, layer)
        if _is_rotated(hf, layer) and (slides or not kind.rotates_windows):
            q, k = (_rotated(part, hf, kind.local_base if slides else "", kind.turns_neighbours) for part in (q, k))
        if kind.head_norms == "rotated head":
            q, k = self.norm(q, f"{name}.query_layernorm"), self.norm(k, f"{name}.key_layernorm")
        if kind.head_norms == "rotated, without weights" and _is_rotated(hf, layer) and hf.get("use_qk_norm", True):
            eps = _float(hf, kind.epsilon, 1e-6)
            q, k = (part * (part.square().mean(-1, keepdim=True) + eps).rsqrt() for part in (q, k))
        q = q * _factors_of_queries(hf, q.shape[2], _is_rotated(hf, layer))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        scale = _float(hf, kind.scale, size) ** -0.5 if kind.scale else _float(hf, "attention_multiplier", size**-0.5)
        cap = _float(hf, "attn_logit_softcapping", 0.0)
        sinks = _first(self.weights, f"{name}.sinks")
        y = _causal(q, k, v, scale, window=window if slides else None, cap=cap, sinks_N=sinks)
        return self.linear(y, f"{name}.o_proj", self.in_output)

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Return latent attention: heads of keys and values from a normalized latent, and one rotated key for all."""
        hf, heads = self.hf, _int(self.hf, "num_attention_heads", 128)
        plain, turned = _int(hf, "qk_nope_head_dim", 128), _int(hf, "qk_rope_head_dim", 64)
        in_down = bool(hf.get("attention_bias", False))
        if _first(self.weights, f"{name}.q_a_proj.weight") is None:
            q = self.linear(x, f"{name}.q_proj", False)
        else:
            latent = self.norm(self.linear(x, f"{name}.q_a_proj", in_down), f"{name}.q_a_layernorm")
            q = self.linear(latent, f"{name}.q_b_proj", False)
        down = self.linear(x, f"{name}.kv_a_proj_with_mqa", in_down)
        kv = self.linear(self.norm(down[..., :-turned], f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj", False)
        q, kv, k_pos = (
            t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in ((q, heads), (kv, heads), (down[..., -turned:], 1))
        )
        whole, turns_neighbours = {**hf, "partial_rotary_factor": 1.0}, bool(hf.get("rope_interleave", True))
        q_pos, k_pos = (_rotated(t, whole, "", turns_neighbours) for t in (q[..., plain:], k_pos))
        k = torch.cat((kv[..., :plain], k_pos.expand_as(q_pos)), -1)
        rope = _table(hf, "rope_parameters") or _table(hf, "rope_scaling")
        mscale = 0.1 * _float(rope, "mscale_all_dim", 0.0) * math.log(_float(rope, "factor", 1.0)) + 1
        y = _causal(torch.cat((q[..., :plain], q_pos), -1), k, kv[..., plain:], (plain + turned) ** -0.5 * mscale**2)
        return self.linear(y, f"{name}.o_proj", self.in_output)

    def inner(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a layer's experts, or of its MLP."""
        if self.kind.mlp_name != "mlp":
            return self.chosen_inner(x, f"{name}.{self.kind.mlp_name}")
        if _router(self.weights, name) is None:
            return self.mlp(x, f"{name}.mlp")
        return _mixture(self.hf, self.weights, x.flatten(0, 1), name, self.activation).view_as(x)

    def chosen_inner(self, x: Tensor, name: str) -> Tensor:
        """Return Llama 4's: one expert reads a token times the sigmoid of its logit, next to a shared expert."""
        router = _first(self.weights, f"{name}.router.weight")
        if router is None:
            return self.mlp(x, name)
        best, chosen = F.linear(x, router).max(-1)
        weighted = x * best.sigmoid().unsqueeze(-1)
        gates, downs = self.weights(f"{name}.experts.gate_up_proj"), self.weights(f"{name}.experts.down_proj")
        y = self.mlp(x, f"{name}.shared_expert")
        for expert in range(len(downs)):
            gate, up = (weighted @ gates[expert]).chunk(2, dim=-1)
            y = y + (chosen == expert).unsqueeze(-1) * ((self.activation(gate) * up) @ downs[expert])
        return y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate_name, up_name, down_name = self.kind.mlp
        up = self.linear(x, f"{name}.{up_name}", self.in_mlp)
        if up_name == "gate_up_proj":
            gate, up = up.chunk(2, dim=2)
            y = self.activation(gate) * up
        elif gate_name:
            y = self.activation(self.linear(x, f"{name}.{gate_name}", self.in_mlp)) * up
        elif self.hf.get("hidden_act") == "xielu":
            p, n = (F.softplus(self.weights(f"{name}.act_fn.{alpha}")) for alpha in ("alpha_p", "alpha_n"))
            y = torch.where(up > 0, p * up * up, (n + 0.5) * (torch.expm1(up.clamp(max=-1e-6)) - up)) + 0.5 * up
        else:
            y = self.activation(up)
        return self.linear(y, f"{name}.{down_name}", self.in_mlp)


def _decoder_logits(kind: Decoder, hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    return _Decoding(hf, weights, kind).logits(tokens_BS)


def neox_logits(hf: HubConfig, weights: Weights, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of GPT-NeoX, whose attention and MLP may read the same residual stream."""
    share, base = _float(hf, "rotary_pct", 0.25), _float(hf, "rotary_emb_base", 1e4)
    hf = {"partial_rotary_factor": share, "rope_theta": base, **hf}
    heads, eps = _int(hf, "num_attention_heads", 64), _float(hf, "layer_norm_eps", 1e-5)
    activation = _ACTIVATIONS[str(hf.get("hidden_act", "gelu"))]
    has_bias = bool(hf.get("attention_bias", True))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights(f"{name}.weight"), weights(f"{name}.bias"), eps)

    def linear(x: Tensor, name: str, has_bias: bool = True) -> Tensor:
        return F.linear(x, weights(f"{name}.weight"), weights(f"{name}.bias") if has_bias else None)

    table = "gpt_neox.embed_in.weight"
    x = F.embedding(tokens_BS, weights(table))
    for layer in range(_int(hf, "num_hidden_layers", 44)):
        name = f"gpt_neox.layers.{layer}"
        qkv = linear(norm(x, f"{name}.input_layernorm"), f"{name}.attention.query_key_value", has_bias)
        q, k, v = qkv.unflatten(2, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        y = linear(_causal(_rotated(q, hf, ""), _rotated(k, hf, ""), v), f"{name}.attention.dense", has_bias)
        read = x if hf.get("use_parallel_residual", True) else x + y
        z = linear(norm(read, f"{name}.post_attention_layernorm"), f"{name}.mlp.dense_h_to_4h")
        x = x + y + linear(activation(z), f"{name}.mlp.dense_4h_to_h")
    tied = hf.get("tie_word_embeddings", False)
    return norm(x, "gpt_neox.final_layer_norm") @ weights(table if tied else "embed_out.weight").T


_OLMO = Decoder({"eps": 1e-5}, norm="plain layer", epsilon="eps")
_OLMO2 = Decoder(
    {"rms_norm_eps": 1e-5},
    before=None,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms="projection",
)
# Gemma's activation, whatever `hidden_act` says: the first releases say gelu and mean its approximation by tanh.
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA = Decoder({"head_dim": 256, "tie_word_embeddings": True, **_GELU}, norm="rms + 1", scales_embedding=True)
_LATER_GEMMA = replace(
    _GEMMA,
    defaults={**_GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    scale="query_pre_attn_scalar",
)
_COHERE = Decoder(
    {"layer_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "logit_scale": 0.0625},
    norm="layer",
    epsilon="layer_norm_eps",
    turns_neighbours=True,
    is_parallel=True,
)
_HUNYUAN = Decoder(
    {"rms_norm_eps": 1e-5}, head_norms="rotated head", has_bias=("attention_bias", "attention_bias", False)
)
DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(),
    "mistral": Decoder({"num_key_value_heads": 8}),
    "ministral3": Decoder({"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
    "llama4_text": Decoder(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
        },
        head_norms="rotated, without weights",
        has_bias=("attention_bias", "attention_bias", False),
        turns_neighbours=True,
        mlp_name="feed_forward",
    ),
    "qwen2": Decoder(
        {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28}, has_bias=(True, False, False)
    ),
    "qwen3": Decoder(
        {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
        head_norms="head",
    ),
    "smollm3": Decoder(
        {
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        }
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "full_every": 4},
        local_base="rope_theta",
    ),
    "phi3": Decoder({"rms_norm_eps": 1e-5}, mlp=("", "gate_up_proj", "down_proj"), has_bias=(False, False, False)),
    "granite": Decoder({"attention_multiplier": 1.0}),
    "starcoder2": Decoder(
        {
            "use_bias": True,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        norm="layer",
        epsilon="norm_epsilon",
        mlp=("", "c_fc", "c_proj"),
        has_bias=("use_bias", "use_bias", "use_bias"),
    ),
    "nemotron": Decoder(
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        norm="layer + 1",
        epsilon="norm_eps",
        mlp=("", "up_proj", "down_proj"),
    ),
    "deepseek_v2": Decoder({"kv_lora_rank": 512}, is_latent=True, has_bias=(False, "attention_bias", "mlp_bias")),
    "deepseek_v3": Decoder({"rope_interleave": True}, is_latent=True, has_bias=(False, "attention_bias", False)),
    "mixtral": Decoder(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        has_bias=(False, False, False),
    ),
    "gpt_oss": Decoder(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "full_every": 2,
            "attention_bias": True,
            "num_experts_per_tok": 4,
        }
    ),
    "qwen2_moe": Decoder(
        {"num_key_value_heads": 16, "num_experts_per_tok": 4, "qkv_bias": True}, has_bias=("qkv_bias", False, False)
    ),
    "qwen3_moe": Decoder(
        {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096}, head_norms="head"
    ),
    "glm4_moe": Decoder(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False},
        head_norms="head",
        has_bias=("attention_bias", False, False),
    ),
    "minimax_m2": Decoder(
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0},
        head_norms="projection",
        has_bias=(False, False, False),
    ),
    "olmoe": Decoder({"rms_norm_eps": 1e-5}, head_norms="projection"),
    "glm4": Decoder(
        {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True},
        after=("post_self_attn_layernorm", "post_mlp_layernorm"),
        mlp=("", "gate_up_proj", "down_proj"),
        has_bias=("attention_bias", False, False),
        turns_neighbours=True,
    ),
    "ernie4_5": Decoder(
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        has_bias=("use_bias", "use_bias", "use_bias"),
        turns_neighbours=True,
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(_HUNYUAN, defaults={**_HUNYUAN.defaults, "num_experts_per_tok": 1}),
    "apertus": Decoder(
        {"rms_norm_eps": 1e-5, "rope_theta": 12000000.0, "hidden_act": "xielu"},
        before=("attention_layernorm", "feedforward_layernorm"),
        head_norms="head",
        mlp=("", "up_proj", "down_proj"),
        has_bias=("attention_bias", "attention_bias", False),
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        defaults={**_COHERE.defaults, "rope_theta": 10000.0, "sliding_window": 4096, "full_every": 4},
        rotates_windows=True,
    ),
    "gemma": replace(_GEMMA, defaults={**_GEMMA.defaults, "num_key_value_heads": 16}),
    "gemma2": replace(
        _LATER_GEMMA,
        defaults={
            **_LATER_GEMMA.defaults,
            "full_every": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": replace(
        _LATER_GEMMA,
        defaults={**_LATER_GEMMA.defaults, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "full_every": 6},
        head_norms="head",
        local_base="rope_local_base_freq",
    ),
}
REFERENCE_LOGITS: Mapping[str, Callable[[HubConfig, Weights, Tensor], Tensor]] = {
    "gpt2": gpt2_logits,
    "gpt_neox": neox_logits,
    **{name: partial(_decoder_logits, kind) for name, kind in DECODERS.items()},
}
