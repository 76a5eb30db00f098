"""Fact: windows that are impossible or unused are refused, with a value that works."""

from __future__ import annotations

from typing import Any

import pytest

from megatron3d.config.validate.rules import check
from tests.support.valid_config import with_changes

WINDOW = {"window_size": [127, 0]}
BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"window_size": [0, 0]},
        "model.window_size=[0,0]: a query would see no key before itself; use [127, 0], or another first number above "
        "0",
    ),
    (
        {"window_size": [16, 4]},
        "model.window_size=[16,4]: attention is causal, so that no key after the query is seen; use [16, 0]",
    ),
    (
        {"window_attn_skip_freq": 2},
        "model.window_attn_skip_freq=2: no layer has a window; set model.window_size, or leave it out",
    ),
    (
        {**WINDOW, "window_attn_skip_freq": 1},
        "model.window_attn_skip_freq=1: no layer has the window; use 2, or another number above 1",
    ),
    (
        {**WINDOW, "window_attn_skip_freq": [1, 1]},
        "model.window_attn_skip_freq=[1,1]: every layer has the window; leave it out",
    ),
    (
        {**WINDOW, "window_attn_skip_freq": 9, "num_layers": 4},
        "model.window_attn_skip_freq=9: longer than model.num_layers=4; use 4 or less",
    ),
]


@pytest.mark.parametrize("changes,message", BROKEN, ids=[message.partition(": ")[0] for _, message in BROKEN])
def test_a_broken_rule_is_reported(changes: dict[str, Any], message: str) -> None:
    assert check(with_changes({"model": changes}), 1) == [message]


def test_a_window_in_some_layers_is_valid() -> None:
    assert check(with_changes({"model": {**WINDOW, "num_layers": 4, "window_attn_skip_freq": 2}}), 1) == []
