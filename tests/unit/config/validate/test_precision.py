"""Fact: a value that the precision or the kernel does not use is refused, and valid combinations pass."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check

BROKEN = [
    (
        {"train": {"precision": "fp16", "loss_scale": 128.0, "loss_scale_window": 5}},
        "train.loss_scale_window=5: not used with train.loss_scale=128.0, which is fixed; leave one of the two out",
    ),
    (
        {"train": {"precision": "fp16", "initial_loss_scale": 4.0, "min_loss_scale": 8.0}},
        "train.min_loss_scale=8.0: more than train.initial_loss_scale=4.0; use that or less",
    ),
    (
        {"train": {"precision": "fp64"}, "optimizer": {"adam_implementation": "apex"}},
        "optimizer.adam_implementation=apex: its kernel computes in fp32, less precise than train.precision=fp64; use "
        "torch",
    ),
    (
        {"optimizer": {"adam_implementation": "apex", "exp_avg_sq_dtype": "bf16"}},
        "optimizer.adam_implementation=apex: its kernel does not support optimizer.exp_avg_sq_dtype=bf16; use torch, "
        "or leave exp_avg_sq_dtype out",
    ),
]
FITTING: list[Any] = [
    {"train": {"precision": "fp16"}},
    {"train": {"precision": "fp16", "initial_loss_scale": 65536.0, "loss_scale_window": 100, "hysteresis": 1}},
    {"train": {"precision": "fp16", "loss_scale": 128.0}},
    {"train": {"precision": "bf16"}, "optimizer": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}},
    {"train": {"precision": "bf16"}, "optimizer": {"adam_implementation": "apex", "exp_avg_dtype": "fp32"}},
]


@pytest.mark.parametrize(("sections", "message"), BROKEN)
def test_a_broken_rule_is_one_message(sections: Any, message: str) -> None:
    assert check(Config.model_validate(sections), 1) == [message]


@pytest.mark.parametrize("sections", FITTING)
def test_valid_precisions_pass(sections: Any) -> None:
    assert check(Config.model_validate(sections), 1) == []
