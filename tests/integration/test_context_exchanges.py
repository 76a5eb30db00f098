"""Fact: training steps with every exchange between context ranks compute the numbers of one process, in float64.

Traffic and FLOPs are their closed forms, and what an exchange cannot do is refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from megatron3d.verify.layouts import differences
from tests.integration.test_dry_run import configure, problems
from tests.support.context_runs import DATA, TOLERANCE, VOCAB_SIZE, alone, config_of, run_trace
from tests.support.turn_ranks import run_turns

MODELS = ("llama", "uneven groups, capped scores and sinks", "windows", "dropout of weights")
TENSOR_1D, TENSOR_2D = (
    {"tensor_model_parallel_size": 2},
    {"tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 2)},
)
RECOMPUTE = {"recompute_granularity": "selective"}
HIERARCHY = {"hierarchical_context_parallel_sizes": (2, 2)}
ROWS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "p2p": ("p2p", 4, {"zero_stage": 1}, {}),
    "p2p, 2d": ("p2p", 2, {**TENSOR_2D, "zero_stage": 3}, RECOMPUTE),
    "p2p, pipeline": ("p2p", 2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}, {}),
    "a2a": ("a2a", 4, {"zero_stage": 2}, RECOMPUTE),
    "a2a, 1d": ("a2a", 2, {**TENSOR_1D, "sequence_parallel": True}, {}),
    "a2a+p2p": ("a2a+p2p", 4, {**HIERARCHY, "zero_stage": 1}, {}),
    "a2a+p2p, 1d": ("a2a+p2p", 4, {**HIERARCHY, **TENSOR_1D}, RECOMPUTE),
}
NUM_RANKS = {"p2p": 4, "p2p, 2d": 8, "p2p, pipeline": 4, "a2a": 4, "a2a, 1d": 4, "a2a+p2p": 4, "a2a+p2p, 1d": 8}


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed documents"])
@pytest.mark.parametrize("row", ROWS)
def test_steps_equal_one_process(row: str, documents: bool) -> None:
    exchange, context, parallel, train = ROWS[row]
    place = list(ROWS).index(row)
    model = MODELS[(place + documents) % len(MODELS)]
    data = list(DATA)[place % len(DATA)] if documents else None
    config = config_of(model, parallel | {"cp_comm_type": exchange, "context_parallel_size": context}, data, **train)
    assert check(config, NUM_RANKS[row], VOCAB_SIZE) == []
    values = run_turns(run_trace, NUM_RANKS[row], config)[0]
    assert list(differences(alone(model, data), values, TOLERANCE)) == []


@pytest.mark.parametrize("recompute", [None, "selective"])
@pytest.mark.parametrize("exchange", ["p2p", "a2a", "a2a+p2p"])
def test_traffic_and_flops_are_their_closed_forms(exchange: str, recompute: str | None) -> None:
    parallel = {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "cp_comm_type": exchange, "zero_stage": 1}
    parallel |= HIERARCHY if exchange == "a2a+p2p" else {}
    train = {"recompute_granularity": recompute} if recompute else {}
    assert problems(configure("llama", parallel, 16, global_batch_size=48, **train), 16, (0, 13)) == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"cp_comm_type": "a2a", "context_parallel_size": 4, "tensor_model_parallel_size": 4},
        "parallel.cp_comm_type=a2a: 2 query heads on each rank, of model.num_attention_heads=8, do not divide by the 4 "
        "ranks that exchange heads; use p2p or all_gather, or another context_parallel_size",
    ),
    "no sizes": (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 4},
        "parallel.cp_comm_type=a2a+p2p: needs parallel.hierarchical_context_parallel_sizes, the ranks of a2a and of "
        "p2p; use for example [2,2]",
    ),
    "wrong sizes": (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 4, "hierarchical_context_parallel_sizes": (4, 2)},
        "parallel.hierarchical_context_parallel_sizes=[4,2]: must be two sizes above 1 whose product is "
        "parallel.context_parallel_size=4; use for example [2,2]",
    ),
    "sizes without use": (
        {"cp_comm_type": "p2p", "context_parallel_size": 4, **HIERARCHY},
        "parallel.hierarchical_context_parallel_sizes=[2,2]: only parallel.cp_comm_type=a2a+p2p has two sizes; "
        "remove it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    parallel, message = REFUSED[case]
    assert check(config_of("llama", parallel), 16, VOCAB_SIZE) == [message]
