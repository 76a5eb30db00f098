"""Fact: fp8 in a layout that cuts a block, or next to what cannot be used with it, is refused with values that work."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.valid_config import with_changes

WIDE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "kv_channels": 64,
    "ffn_hidden_size": 1024,
    "seq_length": 256,
    "family": "llama",
}
FP8 = {"fp8": "e4m3", "precision": "bf16"}
TWO = {"tensor_model_parallel_size": 2}


def changes(model: Any = None, train: Any = None, parallel: Any = None) -> dict[str, Any]:
    """Return the changes that make a valid run with fp8, and some of its own."""
    return {"model": WIDE | (model or {}), "train": FP8 | (train or {}), "parallel": parallel or {}}


SHARE = "train.fp8_recipe=blockwise: blocks of 128"
# Sizes that break a rule, the number of ranks, the message, and changes by its advice.
BROKEN: list[tuple[dict[str, Any], int, str, dict[str, Any]]] = [
    (
        changes({"ffn_hidden_size": 1152}, parallel=TWO),
        2,
        f"{SHARE} features share a scale, but the 1152 features of gate of mlp.fc1 are divided among 2 ranks into "
        "shards of 576; use a multiple of 256, or fp8_recipe tensorwise or rowwise",
        changes({"ffn_hidden_size": 1280}, parallel=TWO),
    ),
    (
        changes({"num_query_groups": 1}),
        1,
        f"{SHARE} features share a scale, but the 64 features of k of attention.qkv are divided into shards of 64; "
        "use a multiple of 128, or fp8_recipe tensorwise or rowwise",
        changes({"num_query_groups": 1}, {"fp8_recipe": "rowwise"}),
    ),
    (
        changes({"seq_length": 72}, {"micro_batch_size": 1}),
        1,
        f"{SHARE} tokens share a scale, but each rank has 72 of train.micro_batch_size=1 sequences of "
        "model.seq_length=72; use lengths whose share is a multiple of 128, or fp8_recipe tensorwise or rowwise",
        changes({"seq_length": 128}, {"micro_batch_size": 1}),
    ),
    (
        changes(parallel={"context_parallel_size": 2}),
        2,
        f"{SHARE} tokens share a scale, but 4 chunks of model.seq_length=256 have 64; use a multiple of 512, or "
        "fp8_recipe tensorwise or rowwise",
        changes({"seq_length": 512}, parallel={"context_parallel_size": 2}),
    ),
    (
        changes(train={"seq_length_warmup": (72, 72, 720)}),
        1,
        f"{SHARE} tokens share a scale, which lengths of train.seq_length_warmup=[72,72,720] are no multiple of; use "
        "multiples of 128, or fp8_recipe tensorwise or rowwise",
        changes(train={"seq_length_warmup": (128, 128, 720)}),
    ),
    (
        changes(parallel={**TWO, "sequence_parallel": True, "tp_comm_overlap": True}),
        2,
        "train.fp8=e4m3: the rounds of parallel.tp_comm_overlap=true do not multiply fp8; leave one of the two out",
        changes(parallel={**TWO, "sequence_parallel": True}),
    ),
    (
        changes(
            parallel={"tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 1), "tp_keep_gathered_weights": True}
        ),
        2,
        "train.fp8=e4m3: backward multiplies another form of W than parallel.tp_keep_gathered_weights=true keeps; "
        "leave one of the two out",
        changes(parallel={"tensor_parallel_mode": "2d", "tensor_parallel_shape": (2, 1)}),
    ),
    (
        changes(train={"recompute_granularity": "selective", "recompute_modules": ("mlp_act", "core_attn")}),
        1,
        "train.fp8=e4m3: the linear after a module of train.recompute_modules=[mlp_act,moe_act] keeps its input in "
        "fp8, so that nothing is saved; use other modules, or recompute_granularity full",
        changes(train={"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}),
    ),
    (
        changes(train={"fp8_exclude": ("*.attention.projection",)}),
        1,
        'train.fp8_exclude=["*.attention.projection"]: "*.attention.projection" fits no linear; use '
        "layers.0.attention.qkv, layers.0.attention.proj or layers.0.mlp.fc1",
        changes(train={"fp8_exclude": ("*.attention.proj",)}),
    ),
    (
        changes(train={"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}),
        1,
        "train.fp8=e4m3: no linear is left that multiplies in fp8; leave it out, or exclude fewer",
        changes(train={"num_layers_at_start_in_bf16": 1}),
    ),
    (
        changes(train={"fp8_param_gather": True, "fp8_recipe": "mxfp8"}),
        1,
        "train.fp8_param_gather=true: backward multiplies W^T, whose blocks with train.fp8_recipe=mxfp8 are not those "
        "of W, and whose values are not stored; use fp8_recipe blockwise or tensorwise",
        changes(train={"fp8_param_gather": True, "fp8_recipe": "tensorwise"}),
    ),
    (
        {**changes(train={"compile": True}), "logging": {"fp8_stats_interval": 5}},
        1,
        "logging.fp8_stats_interval=5: no element is counted with train.compile=true; use train.compile=auto",
        {**changes(), "logging": {"fp8_stats_interval": 5}},
    ),
    (
        {**changes(train={"fp8_param_gather": True}), "logging": {"fp8_loss_interval": 5}},
        1,
        "logging.fp8_loss_interval=5: ranks have no weights in precision with train.fp8_param_gather=true; leave one "
        "of the two out",
        {**changes(), "logging": {"fp8_loss_interval": 5}},
    ),
    (
        {
            **changes({"num_moe_experts": 4, "moe_expert_capacity_factor": 1.5}),
            "logging": {"fp8_loss_interval": 5},
        },
        1,
        "logging.fp8_loss_interval=5: forward alone drops no tokens, as a step does with "
        "model.moe_expert_capacity_factor=1.5; leave one of the two out",
        {**changes({"num_moe_experts": 4}), "logging": {"fp8_loss_interval": 5}},
    ),
]


@pytest.mark.parametrize(("keys", "num_ranks", "message", "fixed"), BROKEN)
def test_a_message_names_what_works(keys: Any, num_ranks: int, message: str, fixed: Any) -> None:
    assert message in check(with_changes(keys), num_ranks, 61)
    assert check(with_changes(fixed), num_ranks, 61) == []


def test_a_linear_that_stays_wide_may_have_any_size() -> None:
    keys = changes({"num_query_groups": 1}, {"fp8_exclude": ("*.attention.qkv",)})
    assert check(with_changes(keys), 1, 61) == []


def test_documents_that_are_balanced_cut_blocks() -> None:
    parallel = {"context_parallel_size": 2, "context_parallel_load_balancer": "documents"}
    keys = {**changes({"seq_length": 512}, parallel=parallel), "data": {"reset_attention_mask": True}}
    (line,) = check(with_changes(keys), 2, 61)
    assert line.startswith(
        f"{SHARE} tokens share a scale, but parallel.context_parallel_load_balancer=documents divides"
    )
