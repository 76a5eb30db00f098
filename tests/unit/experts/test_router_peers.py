"""Fact: choices, weights and losses of routers, and their gradients, are megatron-core's on the same logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.experts.plan import Experts
from megatron3d.experts.router import balance_terms, counts_of_sequences, route, z_terms

M, E, K, SEQUENCES = 66, 12, 4, 3
GROUPS = {"num_groups": 4, "group_topk": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax after": {},
    "softmax before": {"pre_softmax": True, "scaling_factor": 2.5},
    "softmax before, groups": {"pre_softmax": True, **GROUPS},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, one expert": {"score_function": "sigmoid", "topk": 1, "scaling_factor": 1.5},
    "sigmoid, bias": {"score_function": "sigmoid", "has_expert_bias": True},
    "sigmoid, bias, groups": {
        "score_function": "sigmoid",
        "has_expert_bias": True,
        "scaling_factor": 2.5,
        "topk": 6,
        **GROUPS,
    },
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Import megatron-core's module, which warns about packages that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "megatron.core.transformer.moe.moe_utils",
            reason="megatron-core is not installed: pip install --no-deps megatron-core",
        )


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers that have no ties."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(5))


def gradient(of: Callable[[Tensor], Tensor], logits_ME: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and the gradient of its square's weighted sum."""
    leaf_ME = logits_ME.clone().requires_grad_()
    value = of(leaf_ME)
    (value.square() * draw(*value.shape, dtype=value.dtype)).sum().backward()
    assert leaf_ME.grad is not None, "the value depends on the logits"
    return value.detach(), leaf_ME.grad


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights(theirs: Any, name: str) -> None:
    """Compare in fp32: megatron-core takes scores in it whatever the logits are."""
    spec = Experts(E, **{"topk": K, "ffn_hidden_size": 1, **ROUTERS[name]})
    bias_E = draw(E) / 4 if spec.has_expert_bias else None

    def ours(logits_ME: Tensor) -> Tensor:
        routes = route(logits_ME, spec, bias_E)
        return torch.zeros_like(logits_ME).scatter(1, routes.experts_MK, routes.weights_MK)

    def of_megatron(logits_ME: Tensor) -> Tensor:
        groups = spec.num_groups, spec.group_topk, spec.scaling_factor
        choice = theirs.topk_routing_with_score_function
        weights_ME, chosen_ME = choice(logits_ME, spec.topk, spec.pre_softmax, *groups, spec.score_function, bias_E)
        mine_MK = route(logits_ME, spec, bias_E).experts_MK
        assert torch.zeros_like(chosen_ME).scatter(1, mine_MK, True).equal(chosen_ME)
        return weights_ME

    for mine, other in zip(gradient(ours, draw(M, E)), gradient(of_megatron, draw(M, E)), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_balance_loss_of_sequences(theirs: Any, score_function: str) -> None:
    spec, length = Experts(E, K, 1, score_function=score_function), M // SEQUENCES

    def ours(logits_ME: Tensor) -> Tensor:
        routes, sequence_M = route(logits_ME, spec), torch.arange(M) // length
        counts_BE = counts_of_sequences(routes.experts_MK, E, sequence_M, SEQUENCES)
        load_BE = counts_BE.to(logits_ME.dtype) / length
        return balance_terms(routes.scores_ME, load_BE[sequence_M], K).sum() / M

    def of_megatron(logits_ME: Tensor) -> Tensor:
        losses = []
        for part_SE in logits_ME.split(length):
            chosen, scores = theirs.compute_routing_scores_for_aux_loss(part_SE, K, score_function)
            losses.append(theirs.switch_load_balancing_loss_func(scores, chosen.sum(0), length, K, E, 1.0))
        return torch.stack(losses).mean()

    wide = draw(M, E, dtype=torch.float64)
    # Their softmax is in fp32 whatever the logits are.
    tolerance = {"rtol": 2e-6, "atol": 1e-8} if score_function == "softmax" else {"rtol": 1e-12, "atol": 1e-14}
    for mine, other in zip(gradient(ours, wide), gradient(of_megatron, wide), strict=True):
        torch.testing.assert_close(mine, other, check_dtype=False, **tolerance)


def test_the_z_loss(theirs: Any) -> None:
    wide = draw(M, E, dtype=torch.float64)
    mine = gradient(lambda logits_ME: z_terms(logits_ME).mean(), wide)
    for one, other in zip(mine, gradient(lambda logits_ME: theirs.z_loss_func(logits_ME, 1.0), wide), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
