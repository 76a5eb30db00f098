"""Router of a mixture of experts: scores, the choice of experts, their weights, and the losses that balance their load.

    logits -> scores -> top-k of (scores + bias), ties to the lower expert -> weights of the chosen experts

Each token is routed once, and the losses are sums over tokens divided by global counts, so that no result depends on
the layout.  Nor do the choices that a capacity of the experts drops (Lepikhin et al. 2020, arXiv:2006.16668): it is
that of whole sequences.

Letters: M tokens of this rank, N tokens of all ranks that hold parts of the same sequences, E experts, K experts of a
token, C choices, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.experts.plan import POSITION, PROBS, Experts
from megatron3d.parallel.mesh import Axes


class Routes(NamedTuple):
    """Choice of a router: chosen experts in ascending order [M, K], their weights [M, K], and all scores [M, E]."""

    experts_MK: Tensor
    weights_MK: Tensor
    scores_ME: Tensor


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_ME: logits_ME.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits_ME: F.softplus(logits_ME).sqrt(),
}


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, w_EH: Tensor, wide: torch.dtype) -> Tensor:
        ctx.wide = wide
        ctx.save_for_backward(x_MH, w_EH)
        return F.linear(x_MH.to(wide), w_EH.to(wide))

    @staticmethod
    def backward(ctx: Any, dy_ME: Tensor) -> tuple[Tensor, Tensor, None]:
        x_MH, w_EH = ctx.saved_tensors
        dw_EH = (dy_ME.T @ x_MH.to(ctx.wide)).to(w_EH.dtype)
        return (dy_ME @ w_EH.to(ctx.wide)).to(x_MH.dtype), dw_EH, None


def router_logits(x_MH: Tensor, w_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return x W^T + bias [M, E] in fp32 or wider; backward keeps x and W in their own dtypes."""
    wide = torch.promote_types(x_MH.dtype, torch.float32)
    logits_ME: Tensor = _Logits.apply(x_MH, w_EH, wide)
    return logits_ME if bias_E is None else logits_ME + bias_E.to(wide)


def route(
    logits_ME: Tensor,
    experts: Experts,
    bias_E: Tensor | None = None,
    once: Callable[[Callable[[], Tensor]], Tensor] = lambda choose: choose(),
    counted: Callable[[Tensor, Tensor], None] | None = None,
    row_M: Tensor | None = None,
) -> Routes:
    """Return the chosen experts of each token; `bias_E` is added to the scores for the choice alone.

    Args:
        once: calls what chooses, or returns the choice that it has made before.
        counted: called with a new choice and the scores.
        row_M: index in the global batch of each token, which then chooses its experts; None: the scores choose.
    """
    scores_ME = _SCORES[experts.score_function](logits_ME)
    choice_ME = scores_ME.detach() if bias_E is None else scores_ME.detach() + bias_E

    def choose() -> Tensor:
        if row_M is None:
            chosen_MK = top_experts(_in_best_groups(choice_ME, experts), experts.topk)
        else:
            chosen_MK = experts_in_turn(row_M, experts)
        if counted is not None:
            counted(chosen_MK, scores_ME.detach())
        return chosen_MK

    chosen_MK = once(choose)
    return Routes(chosen_MK, _weights(logits_ME, scores_ME, chosen_MK, experts), scores_ME)


def top_experts(choice_ME: Tensor, count: int) -> Tensor:
    """Return the `count` largest of each row in ascending order of their index; of equal ones the first."""
    best_MK = torch.argsort(choice_ME, dim=-1, descending=True, stable=True)[:, :count]
    return best_MK.sort(dim=-1).values


def experts_in_turn(row_M: Tensor, experts: Experts) -> Tensor:
    """Return experts of each token by its index in the global batch: consecutive tokens take all experts in turn."""
    slot_K = torch.arange(experts.topk, device=row_M.device)
    return ((row_M.unsqueeze(1) * experts.topk + slot_K) % experts.num_experts).sort(dim=-1).values


def _in_best_groups(choice_ME: Tensor, experts: Experts) -> Tensor:
    """Return the scores with those outside of each token's best groups at minus infinity.

    A group's score is the sum of its largest, topk / group_topk (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2)
    or one (DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2).
    """
    if experts.num_groups is None or experts.group_topk is None:
        return choice_ME
    grouped = choice_ME.unflatten(-1, (experts.num_groups, -1))
    score_MG = grouped.topk(experts.num_group_scores, dim=-1).values.sum(-1)
    best = torch.zeros_like(score_MG, dtype=torch.bool).scatter_(1, top_experts(score_MG, experts.group_topk), True)
    kept_ME: Tensor = grouped.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(-2)
    return kept_ME


def _weights(logits_ME: Tensor, scores_ME: Tensor, chosen_MK: Tensor, experts: Experts) -> Tensor:
    """Return the weights of the chosen experts: normalized over them, unless softmax came before the choice."""
    if experts.score_function == "softmax" and not experts.pre_softmax:
        weights_MK = logits_ME.gather(1, chosen_MK).softmax(-1)
    else:
        weights_MK = scores_ME.gather(1, chosen_MK)
        if experts.score_function != "softmax" and experts.topk > 1:
            weights_MK = weights_MK / (weights_MK.sum(-1, keepdim=True) + 1e-20)
    return weights_MK if experts.scaling_factor == 1 else weights_MK * experts.scaling_factor


def counts_of(sorted_R: Tensor, num_experts: int) -> Tensor:
    """Return how often each of `num_experts` indices occurs in a sorted tensor, without atomics."""
    edges = torch.arange(num_experts + 1, device=sorted_R.device, dtype=sorted_R.dtype)
    counts_E: Tensor = torch.searchsorted(sorted_R, edges).diff()
    return counts_E


def counts_of_sequences(chosen_MK: Tensor, num_experts: int, sequence_M: Tensor, num_sequences: int) -> Tensor:
    """Return [B, E]: how many tokens of each sequence chose each expert, as fp32, exact below 2^24."""
    flat = (sequence_M.unsqueeze(1) * num_experts + chosen_MK).flatten()
    counts = counts_of(flat.sort().values, num_sequences * num_experts)
    return counts.view(num_sequences, num_experts).to(torch.float32)


def balance_terms(scores_ME: Tensor, load_ME: Tensor, topk: int) -> Tensor:
    """Return for each token E/K sum_e load_e p_e, its term of a balance loss: 1 where load and scores are even.

    Args:
        scores_ME: p, once each row is divided by its sum.
        load_ME: share of tokens that chose each expert, among those that the loss is taken over; rows sum to K.
    """
    probs_ME = scores_ME / scores_ME.sum(-1, keepdim=True)
    return (probs_ME * load_ME).sum(-1) * (scores_ME.shape[1] / topk)


def z_terms(logits_ME: Tensor) -> Tensor:
    """Return for each token the square of its logits' logarithmic sum of exponentials."""
    return torch.logsumexp(logits_ME, dim=-1).square()


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_empty(0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, ctx.like.new_ones(()) * ctx.scale, None


def with_loss(x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
    """Return x; its backward adds the gradient of `scale` times `loss`, a scalar that the caller does not add up."""
    y: Tensor = _WithLoss.apply(x, loss, scale)
    return y


class Capacity(NamedTuple):
    """Tokens that an expert takes of each sequence, and which: `PROBS` or `POSITION`."""

    tokens: int
    policy: str = PROBS


def choices_kept(routes: Routes, row_M: Tensor, seq_length: int, capacity: Capacity, axes: Axes, comm: Comm) -> Tensor:
    """Return for each choice of this rank's tokens whether its expert takes it, bool [M, K].

    Of each sequence an expert takes the tokens of the largest weights, of equal ones those that come first; by position
    all weights count as equal.

    Args:
        row_M: index in the global batch of each token.
        axes: axes that split sequences over ranks.
    """
    num_experts, weights_MK = routes.scores_ME.shape[1], routes.weights_MK.detach()
    if capacity.policy == POSITION:
        weights_MK = torch.zeros_like(weights_MK)
    experts_NK, weights_NK, row_N = routes.experts_MK, weights_MK, row_M
    if axes:
        parts = [comm.all_gather(each, axes, 0) for each in (experts_NK, weights_NK, row_N)]
        experts_NK, weights_NK, row_N = (part.wait() for part in parts)
    group_NK = (row_N // seq_length).unsqueeze(1) * num_experts + experts_NK
    kept_NK = _best_of_groups(group_NK.flatten(), weights_NK.flatten(), row_N, capacity.tokens).view_as(group_NK)
    first = comm.mesh.index(axes) * len(row_M)
    return kept_NK[first : first + len(row_M)]


def _best_of_groups(group_C: Tensor, weight_C: Tensor, row_N: Tensor, capacity: int) -> Tensor:
    """Return whether each choice is among the `capacity` largest weights of its group; of equal ones the first rows."""
    place_C = torch.arange(len(group_C), device=group_C.device)
    order_C = place_C.view(len(row_N), -1)[row_N.argsort()].flatten()
    order_C = order_C[weight_C[order_C].argsort(descending=True, stable=True)]
    sorted_C, by_group_C = group_C[order_C].sort(stable=True)
    rank_C = place_C - torch.searchsorted(sorted_C, sorted_C)
    return torch.empty_like(group_C, dtype=torch.bool).scatter_(0, order_C[by_group_C], rank_C < capacity)
