"""Fact: with experts over ranks every text has the logits of one process, and ranks that share experts equal bits.

The bug that this finds: such ranks choose different tokens by a rounding error, run unequally often, and hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.inference.sampling import Sampler, score
from megatron3d.model.microbatch import Pass
from tests.support.turn_ranks import run_turns
from tests.unit.inference.test_sampling import CPU, assert_equal, executor_of

MODEL: dict[str, Any] = {
    "family": "llama",
    "num_attention_heads": 8,
    "hidden_size": 32,
    "num_layers": 2,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 8,
}
SIZE, SPLIT, BY = "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_token_dispatcher_type"
TENSOR = "tensor_model_parallel_size"
LAYOUTS: list[dict[str, Any]] = [
    {SIZE: 8, BY: "alltoall"},
    {SIZE: 2, SPLIT: 2, BY: "allgather", "pipeline_model_parallel_size": 2},
    {SIZE: 4, BY: "alltoall", TENSOR: 2, "context_parallel_size": 2, "zero_stage": 3},
    {SIZE: 4, TENSOR: 2, "sequence_parallel": False},  # both tensor ranks have all tokens
    {SIZE: 8, "tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 4)},
    {"tensor_parallel_mode": "3d", "tensor_parallel_shape": (2, 2, 2)},
]
PAIRS = [([3, 1, 4], [1, 5]), ([9, 2, 6, 5], [3])]


def test_logits_are_those_of_one_process() -> None:
    assert_equal([(MODEL, layout) for layout in LAYOUTS])


def perturbed(rank: int, world_size: int, layout: dict[str, Any]) -> tuple[Tensor, list[float]]:
    """Return next-token logits and log probabilities of a rank whose own logits are off by a little."""
    executor = executor_of(MODEL, layout, world_size, rank)
    original = executor._forward

    def forward(passes: Sequence[Pass]) -> Mapping[int, Tensor]:
        return {place: logits + 1e-3 * rank * torch.rand_like(logits) for place, logits in original(passes).items()}

    executor._forward = forward  # type: ignore[method-assign]
    logits = Sampler(executor, CPU).next_logits([context for context, _ in PAIRS])
    return logits, [each.log_prob for each in score(executor, PAIRS, CPU)]


@pytest.mark.parametrize("layout", [{SIZE: 4}, {SPLIT: 2, "pipeline_model_parallel_size": 2}])
def test_ranks_that_share_experts_have_equal_bits(layout: dict[str, Any]) -> None:
    first, *others = run_turns(perturbed, 4, layout)
    for logits, log_probs in others:
        assert logits.equal(first[0]) and log_probs == first[1]
