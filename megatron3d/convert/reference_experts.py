"""Reference forward passes of mixtures of experts and of latent attention, from a file's tensors: slow and obvious.

Mixtures: Jiang et al. 2024 (arXiv:2401.04088), DeepSeek-AI 2024 (arXiv:2412.19437, section 2.1).
Letters: T tokens, H hidden, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.convert.fields import HubConfig

Weights = Callable[[str], Tensor]
Activation = Callable[[Tensor], Tensor]


def has_router(weights: Weights, layer: str) -> bool:
    """Return whether a layer, such as `model.layers.3`, has experts."""
    return first_of(weights, *_routers(layer)) is not None


def mixture(hf: HubConfig, weights: Weights, x_TH: Tensor, layer: str, activation: Activation) -> Tensor:
    """Return the sum of the chosen experts' outputs by their weights, and of the shared experts' output."""
    router = first_of(weights, *_routers(layer))
    assert router is not None, f"{layer} has a router"
    logits_TE = F.linear(x_TH, router, first_of(weights, f"{layer}.mlp.router.bias"))
    chosen, shares = _choice(hf, logits_TE, first_of(weights, f"{layer}.mlp.gate.e_score_correction_bias"))
    y_TH = torch.zeros_like(x_TH)
    for expert in chosen.unique().tolist():
        token, slot = torch.nonzero(chosen == expert, as_tuple=True)
        if first_of(weights, f"{layer}.mlp.experts.gate_up_proj_bias") is None:
            gate, up, down = _expert(weights, layer, expert)
            inner = activation(F.linear(x_TH[token], gate)) * F.linear(x_TH[token], up)
            outputs = F.linear(inner, down)
        else:
            outputs = _clamped_expert(weights, f"{layer}.mlp.experts", expert, x_TH[token])
        y_TH.index_add_(0, token, outputs * shares[token, slot].unsqueeze(1))
    for name in ("shared_experts", "shared_expert"):
        if first_of(weights, f"{layer}.mlp.{name}.gate_proj.weight") is not None:
            gate, up, down = (weights(f"{layer}.mlp.{name}.{part}_proj.weight") for part in ("gate", "up", "down"))
            shared_TH = F.linear(activation(F.linear(x_TH, gate)) * F.linear(x_TH, up), down)
            share = first_of(weights, f"{layer}.mlp.shared_expert_gate.weight")
            y_TH = y_TH + (shared_TH if share is None else F.linear(x_TH, share).sigmoid() * shared_TH)
    return y_TH


def _choice(hf: HubConfig, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token and their weights, each [T, K]."""
    is_sigmoid = str(hf["model_type"]) in ("deepseek_v3", "glm4_moe")
    scores = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    groups, kept = int(str(hf.get("n_group") or 1)), int(str(hf.get("topk_group") or 1))
    if is_sigmoid and groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.sort(-1, descending=True).values[..., :2].sum(-1).topk(kept).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = choice.topk(int(str(hf.get("num_experts_per_tok") or 8))).indices
    shares = scores.gather(-1, chosen)
    always = {"mixtral": True, "gpt_oss": True, "deepseek_v3": True, "glm4_moe": True}.get(str(hf["model_type"]), False)
    if hf.get("norm_topk_prob", always):
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares * float(str(hf.get("routed_scaling_factor") or 1.0))


def _clamped_expert(weights: Weights, name: str, expert: int, x_TH: Tensor) -> Tensor:
    """Return the output of an expert of gpt-oss (OpenAI 2025), whose gate and up columns alternate."""
    both = x_TH @ weights(f"{name}.gate_up_proj")[expert] + weights(f"{name}.gate_up_proj_bias")[expert]
    gate, up = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return inner @ weights(f"{name}.down_proj")[expert] + weights(f"{name}.down_proj_bias")[expert]


def _expert(weights: Weights, layer: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and down projection of an expert, which files hold in one of three ways."""
    both = first_of(weights, f"{layer}.mlp.experts.gate_up_proj")
    if both is not None:
        gate, up = both[expert].chunk(2)
        return gate, up, weights(f"{layer}.mlp.experts.down_proj")[expert]
    named = [f"{layer}.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
    if first_of(weights, named[0]) is None:
        named = [f"{layer}.block_sparse_moe.experts.{expert}.w{number}.weight" for number in (1, 3, 2)]
    return weights(named[0]), weights(named[1]), weights(named[2])


def _routers(layer: str) -> tuple[str, ...]:
    return f"{layer}.mlp.gate.weight", f"{layer}.block_sparse_moe.gate.weight", f"{layer}.mlp.router.weight"


def first_of(weights: Weights, *names: str) -> Tensor | None:
    """Return the first of some tensors that the files have."""
    for name in names:
        try:
            return weights(name)
        except KeyError:
            continue
    return None
