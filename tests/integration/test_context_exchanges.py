"""Fact: training steps with every exchange between context ranks compute the numbers of one process, in float64.

Traffic and FLOPs are their closed forms, and what an exchange cannot do is refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check
from megatron3d.verify.layouts import StepTrace, differences, trace
from tests.integration.test_context import DATA
from tests.integration.test_dry_run import configure, problems
from tests.support.turn_ranks import connect, run_turns

VOCAB_SIZE, TOLERANCE = 11, 1e-10
SMALL = {"family": "llama", "num_layers": 2, "hidden_size": 48, "seq_length": 16, "make_vocab_size_divisible_by": 1}
MODELS: dict[str, dict[str, Any]] = {
    "two key/value heads": {**SMALL, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 40},
    "uneven groups": {
        **SMALL,
        "num_attention_heads": 24,
        "num_query_groups": 3,
        "kv_channels": 8,
        "qk_layernorm": True,
        "ffn_hidden_size": 40,
        "attention_softcap": 0.5,
        "softmax_type": "learnable",
    },
    "windows": {
        **SMALL,
        "num_attention_heads": 8,
        "ffn_hidden_size": 40,
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
    },
    "dropout of weights": {
        **SMALL,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 40,
        "attention_dropout": 0.3,
        "attention_softcap": 0.5,
    },
}
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


def config_of(model: str, parallel: dict[str, Any], data: str | None = None, **train: Any) -> Config:
    settings = {"precision": "fp64", "loss_chunk_tokens": 12, "micro_batch_size": 4, "global_batch_size": 8}
    sections = {"model": MODELS[model], "parallel": parallel, "train": settings | train}
    if data is not None:
        sections["data"] = DATA[data]
    return Config.model_validate({**sections, "optimizer": {"lr": 1e-2, "clip_grad": 0.5}})


def run_trace(rank: int, world_size: int, config: Config) -> StepTrace | None:
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), num_steps=2)


@cache
def alone(model: str, data: str | None) -> StepTrace:
    values = run_trace(0, 1, config_of(model, {}, data, micro_batch_size=8))
    assert values is not None
    return values


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed documents"])
@pytest.mark.parametrize("row", ROWS)
def test_steps_equal_one_process(row: str, documents: bool) -> None:
    exchange, context, parallel, train = ROWS[row]
    place = list(ROWS).index(row)
    model = list(MODELS)[(place + documents) % len(MODELS)]
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
    assert check(config_of("two key/value heads", parallel), 16, VOCAB_SIZE) == [message]
