"""Experts of a model as values: their sizes, how a router chooses among them, and how their load is balanced."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SEQUENCE, GLOBAL = "seq_aux_loss", "global_aux_loss"


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of a layer's MLP.

    Attributes:
        topk: experts that each token is sent to.
        ffn_hidden_size: inner features of each expert.
        shared_ffn_hidden_size: inner features of the shared experts, which every token is sent to; 0: none.
        has_shared_gate: the shared experts' output is multiplied by a sigmoid of the token.
        layers: pattern that repeats over depth, 1 for a layer with experts; empty: every layer.
        score_function: what makes scores of logits, one of `SCORES`.
        pre_softmax: softmax over all experts before the choice, without normalization; else over the chosen ones.
        num_groups, group_topk: experts are in groups, of which only the best are chosen from; None: no groups.
        scaling_factor: factor of the weights of the chosen experts.
        has_router_bias: the router's logits have a bias, a parameter.
        has_expert_bias: the choice has a bias, which is no parameter: it moves towards an even load at each step.
    """

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    has_shared_gate: bool = False
    layers: tuple[int, ...] = ()
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    has_router_bias: bool = False
    has_expert_bias: bool = False


def capacity_of(factor: float, seq_length: int, experts: Experts) -> int:
    """Return the most tokens that an expert takes of one sequence: `factor` times those of an even load, rounded up."""
    return math.ceil(factor * seq_length * experts.topk / experts.num_experts)


@dataclass(frozen=True)
class Balance:
    """What balances the experts' load in training, which no parameter depends on.

    Attributes:
        loss: `SEQUENCE`, `GLOBAL` or "none".
        coeff: factor of that loss.
        z_coeff: factor of the router's z-loss (Zoph et al. 2022, arXiv:2202.08906, equation 5).
        bias_update_rate: step of the choice's bias.
        capacity_factor: most tokens of a sequence that an expert takes, in multiples of an even load; None: all that
            choose it.
    """

    loss: str = "none"
    coeff: float = 0.0
    z_coeff: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float | None = None
