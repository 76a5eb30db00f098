"""Tiny models on context ranks: their configurations, packed data, and traces of training steps in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron3d.attention.context.plan import BOTH, ZIGZAG
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.verify.layouts import StepTrace, trace
from tests.support.turn_ranks import connect

EOD, VOCAB_SIZE, SEQ_LENGTH, TOLERANCE = 0, 11, 16, 1e-10
SMALL = {"num_layers": 2, "hidden_size": 48, "seq_length": SEQ_LENGTH, "make_vocab_size_divisible_by": 1}
LLAMA = {**SMALL, "family": "llama", "num_attention_heads": 8, "ffn_hidden_size": 40}
UNEVEN = {**LLAMA, "num_attention_heads": 24, "num_query_groups": 3, "kv_channels": 8, "qk_layernorm": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **SMALL,
        "family": "gpt2",
        "num_attention_heads": 8,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "llama": {**LLAMA, "num_query_groups": 2},
    "uneven groups": UNEVEN,
    "uneven groups, capped scores and sinks": {**UNEVEN, "attention_softcap": 0.5, "softmax_type": "learnable"},
    "windows": {**LLAMA, "window_size": (4, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
    "dropout of weights": {**LLAMA, "num_query_groups": 4, "attention_dropout": 0.3, "attention_softcap": 0.5},
}
RESET = {"reset_position_ids": True, "reset_attention_mask": True}
DATA: dict[str, dict[str, Any]] = {
    "documents, positions restart": {**RESET, "eod_mask_loss": True, "goldfish_k": 4, "goldfish_h": 2},
    "documents, positions go on": {"reset_attention_mask": True, "pad_token_id": 3},
    "positions restart, attention goes on": {"reset_position_ids": True, "goldfish_k": 5, "goldfish_h": 3},
}


def config_of(model: str, parallel: dict[str, Any], data: str | None = None, **train: Any) -> Config:
    """Return the configuration of one of `MODELS` with one of `DATA`."""
    settings = {"precision": "fp64", "loss_chunk_tokens": 12, "micro_batch_size": 4, "global_batch_size": 8}
    sections = {"model": MODELS[model], "parallel": parallel, "train": settings | train}
    if data is not None:
        sections["data"] = DATA[data]
    return Config.model_validate({**sections, "optimizer": {"lr": 1e-2, "clip_grad": 0.5}})


def exchange_of(exchange: str, balancer: str = ZIGZAG) -> dict[str, Any]:
    """Return the keys of four context ranks."""
    keys: dict[str, Any] = {"context_parallel_size": 4, "cp_comm_type": exchange}
    keys["context_parallel_load_balancer"] = balancer
    return keys | ({"hierarchical_context_parallel_sizes": (2, 2)} if exchange == BOTH else {})


def run_trace(rank: int, world_size: int, config: Config) -> StepTrace | None:
    """Return the trace of two steps, on rank 0."""
    spec = RunSpec(config, world_size, VOCAB_SIZE, rank)
    return trace(spec, connect(spec), num_steps=2)


@cache
def alone(model: str, data: str | None) -> StepTrace:
    """Return the trace of one process."""
    values = run_trace(0, 1, config_of(model, {}, data, micro_batch_size=8))
    assert values is not None
    return values
