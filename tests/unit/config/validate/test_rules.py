"""Fact: a model, learning-rate schedule, kernel or output that breaks a rule is refused, with a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.valid_config import with_changes

BROKEN = [
    (
        {"train": {"global_batch_size": 6, "micro_batch_size": 4, "pad_global_batch": True}},
        1,
        "train.global_batch_size=6: not micro_batch_size 4 x a whole number of microbatches, at least one for each of "
        "1 data-parallel ranks; use 4 or 8",
    ),
    (
        {"train": {"pad_global_batch": True}, "model": {"num_moe_experts": 4}},
        1,
        "train.pad_global_batch=true: empty microbatches would count in model.num_moe_experts=4; leave one of the two "
        "out",
    ),
    (
        {
            "train": {"pad_global_batch": True, "fp8": "e4m3", "fp8_recipe": "rowwise"},
            "logging": {"fp8_stats_interval": 5},
        },
        1,
        "train.pad_global_batch=true: empty microbatches would count in logging.fp8_stats_interval=5; leave one of the "
        "two out",
    ),
    (
        {"model": {"kv_channels": None, "hidden_size": 40}},
        1,
        "model.num_attention_heads=16: 16 does not divide model.hidden_size=40; use 4, 5, 8, 10 or 20, "
        "or set model.kv_channels",
    ),
    (
        {"model": {"num_query_groups": 3}},
        1,
        "model.num_query_groups=3: 3 does not divide model.num_attention_heads=16; use 1, 2, 4, 8 or 16",
    ),
    (
        {"model": {"kv_channels": 5, "position_embedding_type": "rope"}},
        1,
        "model.kv_channels=5: RoPE rotates pairs of channels, but a head has 5; use model.kv_channels 4 or 6",
    ),
    (
        {"model": {"normalization": "PlainLayerNorm", "apply_layernorm_1p": True}},
        1,
        "model.apply_layernorm_1p=true: norms of normalization=PlainLayerNorm have no weight; leave it out, or use "
        "LayerNorm",
    ),
    (
        {"model": {"norm_placement": "shared"}},
        1,
        "model.norm_placement=shared: attention and MLP read the same input with model.use_parallel_residual=true "
        "only; set that, or use pre",
    ),
    (
        {"model": {"max_position_embeddings": 7}},
        1,
        "model.max_position_embeddings=7: less than model.seq_length=8; use 8 or more, or leave it out",
    ),
    (
        {"model": {"vocab_size": 60}},
        1,
        "model.vocab_size=60: less than the tokenizer's 61 tokens; use 61 or more, or leave it out",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD", "lr_decay_iters": 10, "lr_warmup_iters": 4, "lr_wsd_decay_iters": 7}},
        1,
        "optimizer.lr_wsd_decay_iters=7: more than the 6 iterations that optimizer.lr_decay_iters=10 leaves after "
        "lr_warmup_iters 4; use 1 or 6",
    ),
    (
        {"optimizer": {"param_groups": [{"params": ["embedding.*", "*.norm.weight"]}]}},
        1,
        'optimizer.param_groups=[{params: ["embedding.*","*.norm.weight"], lr_mult: 1.0, wd_mult: null, '
        'optimizer: null}]: "*.norm.weight" fits no parameter; use names such as embedding.weight, '
        "embedding.position or layers.0.input_norm.weight",
    ),
    (
        {"optimizer": {"param_groups": [{"params": "*.q.weight", "lr_mult": 2.0}]}},
        1,
        'optimizer.param_groups=[{params: "*.q.weight", lr_mult: 2.0, wd_mult: null, optimizer: null}]: entry 1 names '
        "layers.0.attention.q.weight, but not layers.0.attention.k.weight, which is stored in the same parameter; name "
        "all of its parts or none",
    ),
    (
        {"optimizer": {"optimizer": "lion", "param_groups": [{"params": "embedding.*", "optimizer": "adam"}]}},
        1,
        'optimizer.param_groups=[{params: "embedding.*", lr_mult: 1.0, wd_mult: null, optimizer: adam}]: entry 1 asks '
        "for adam, but optimizer.optimizer=lion updates all; leave optimizer out",
    ),
    (
        {"train": {"train_samples": 800}},
        1,
        "train.train_samples=800: not used with train.train_iters=10, since a run has one length; use null for one of "
        "the two",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 5}, "train": {"train_samples": 800, "train_iters": None}},
        1,
        "optimizer.lr_warmup_iters=5: the schedule counts samples, as train.train_samples=800 does; use "
        "optimizer.lr_warmup_samples=40",
    ),
    (
        {"optimizer": {"lr_decay_samples": 41}},
        1,
        "optimizer.lr_decay_samples=41: the schedule counts iterations, since the run has no train.train_samples; use "
        "optimizer.lr_decay_iters=6",
    ),
    (
        {"optimizer": {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}},
        1,
        "optimizer.lr_warmup_fraction=0.1: not used with optimizer.lr_warmup_iters=5, since the warm-up has one "
        "length; leave one of the two out",
    ),
    (
        {"optimizer": {"lr_warmup_init": 0.5}},
        1,
        "optimizer.lr_warmup_init=0.5: more than optimizer.lr=0.0003, at which the warm-up ends; use 0 to 0.0003",
    ),
    (
        {"optimizer": {"start_weight_decay": 0.5}},
        1,
        "optimizer.start_weight_decay=0.5: not used with optimizer.weight_decay_incr_style=constant; use "
        "optimizer.weight_decay, or linear",
    ),
    (
        {"optimizer": {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.5}},
        1,
        "optimizer.weight_decay_incr_style=cosine: needs optimizer.end_weight_decay; set that, or use constant",
    ),
    (
        {
            "optimizer": {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.1,
                "end_weight_decay": 0.2,
                "weight_decay": 0.05,
            }
        },
        1,
        "optimizer.weight_decay=0.05: not used with optimizer.weight_decay_incr_style=linear, where "
        "start_weight_decay and end_weight_decay say it; leave it out",
    ),
    (
        {"train": {"train_samples": 7, "train_iters": None}},
        1,
        "train.train_samples=7: fewer than the 8 of one batch; use 8 or more",
    ),
    (
        {
            "train": {"train_samples": 800, "train_iters": None},
            "optimizer": {"lr_warmup_samples": 11, "lr_decay_samples": 10},
        },
        1,
        "optimizer.lr_warmup_samples=11: more than optimizer.lr_decay_samples=10; use 0 to 10",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 11, "lr_decay_iters": 10}},
        1,
        "optimizer.lr_warmup_iters=11: more than optimizer.lr_decay_iters=10; use 0 to 10",
    ),
    (
        {
            "parallel": {"tensor_model_parallel_size": 2},
            "train": {"tp_grad_reduce_in_bf16": True},
        },
        2,
        "train.tp_grad_reduce_in_bf16=true: gradients of train.precision=fp32 are not in bf16; use false, or "
        "train.precision bf16",
    ),
    ({"optimizer": {"lr": 0.1, "min_lr": 0.2}}, 1, "optimizer.min_lr=0.2: more than optimizer.lr=0.1; use 0 to 0.1"),
    (
        {"train": {"precision": "fp64", "grad_reduce_in_bf16": True}},
        1,
        "train.grad_reduce_in_bf16=true: would undo train.precision=fp64, which is for verification; use false",
    ),
    (
        {
            "parallel": {"tensor_model_parallel_size": 2},
            "train": {"precision": "bf16", "tp_grad_reduce_in_bf16": True},
        },
        2,
        "train.tp_grad_reduce_in_bf16=true: 1d: t 2 reduces no weight gradients; use false, or mode 2d, 2.5d, 3d or "
        "grid",
    ),
    (
        {"train": {"precision": "fp64", "norm_implementation": "apex"}},
        1,
        "train.norm_implementation=apex: its kernels compute statistics in fp32, less precise than "
        "train.precision=fp64; use "
        "torch",
    ),
    (
        {"train": {"recompute_granularity": "selective", "recompute_num_layers": 2}},
        1,
        "train.recompute_num_layers=2: not used with train.recompute_granularity=selective; use full, or leave "
        "recompute_num_layers out",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "message"), BROKEN, ids=[message[:50] for _, _, message in BROKEN])
def test_a_broken_rule_is_one_message_with_numbers(changes: Any, world_size: int, message: str) -> None:
    assert check(with_changes(changes), world_size, vocab_size=61) == [message]


def test_a_valid_configuration_has_no_problem() -> None:
    assert check(with_changes({}), 2, vocab_size=61) == []
