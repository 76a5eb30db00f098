"""Fact: an invalid path, split, blend or mask of the data section is refused, with a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.valid_config import with_changes

BROKEN = [
    (
        {"data": {"split": "90,10"}},
        1,
        "data.split=90,10: not three weights of at least 0 for train, valid and test; use 969,30,1",
    ),
    (
        {"data": {"split": "1,0,0"}, "train": {"eval_interval": 5}},
        1,
        "data.split=1,0,0: no validation split for train.eval_interval=5; use for example 90,10,0, or eval_interval "
        "null",
    ),
    (
        {"data": {"split": "0,1,0"}},
        1,
        "data.split=0,1,0: nothing is left to train on; use for example 969,30,1",
    ),
    (
        {"data": {"data_path": (1, "a", -1, "b")}},
        1,
        "data.data_path=[1.0,a,-1.0,b]: weights must be 0 or more, and one above 0; use for example [7, data/a, 3, "
        "data/b]",
    ),
    (
        {"data": {"data_path": "a", "train_data_path": "b"}},
        1,
        "data.data_path=a: not used with data.train_data_path; leave one of them out",
    ),
    (
        {"data": {"train_data_path": "b"}, "train": {"eval_interval": 5}},
        1,
        "data.train_data_path=b: no validation data for train.eval_interval=5; add data.valid_data_path, or use "
        "eval_interval null",
    ),
    (
        {"data": {"valid_data_path": "b"}},
        1,
        "data.valid_data_path=b: not used without data.train_data_path; give that in place of data_path, or leave "
        "valid_data_path out",
    ),
    (
        {"data": {"data_path": "hf:a"}},
        1,
        'data.data_path="hf:a": a streamed dataset cannot be split; use data.train_data_path and data.valid_data_path',
    ),
    (
        {"data": {"train_data_path": (1, "hf:a", 1, "b")}},
        1,
        'data.train_data_path=[1.0,"hf:a",1.0,b]: streamed datasets cannot be blended with token files; make token '
        "files of all",
    ),
    (
        {"data": {"train_data_path": ("hf:a", "hf:b")}},
        1,
        'data.train_data_path=["hf:a","hf:b"]: the sizes of streamed datasets are not known; use weights, as '
        "[0.7, hf:a, 0.3, hf:b]",
    ),
    (
        {"data": {"reset_position_ids": True}, "model": {"position_embedding_type": "none"}},
        1,
        "data.reset_position_ids=true: the model has no positions; use false",
    ),
    (
        {"data": {"tokenizer_type": "ByteTokenizer", "tokenizer_model": "x"}},
        1,
        "data.tokenizer_model=x: ByteTokenizer has no model file; leave it out",
    ),
]


@pytest.mark.parametrize(("changes", "world_size", "message"), BROKEN, ids=[message[:50] for _, _, message in BROKEN])
def test_a_broken_rule_is_one_message_with_numbers(changes: Any, world_size: int, message: str) -> None:
    assert check(with_changes(changes), world_size, vocab_size=61) == [message]
