"""Fact: a checkpoint whose counters cannot be those of a run is refused, even where its checksums are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron3d.checkpoint.index import Index, Meta, read_meta
from megatron3d.errors import UserError

COUNTERS: dict[str, Any] = {"iteration": 3, "consumed_samples": 24, "optimizer_steps": 3.0}
NAN, INFINITE = float("nan"), float("inf")


def saved_with(folder: Path, **counters: Any) -> Meta:
    """Write and read an index with these counters and a right checksum."""
    meta = {"model": {}, "identity": {}, **COUNTERS, **counters}
    (folder / "index.json").write_text(Index(iteration=3, meta=meta, tensors={}).to_json())
    return read_meta(folder)


def test_possible_counters_are_read(tmp_path: Path) -> None:
    scale = {"scale": 65536.0, "growth_tracker": 2.0, "hysteresis_tracker": -1.0}
    meta = saved_with(tmp_path, loss_scale=scale, cursors={"0": [1, 2, 3, 4, 5, 6, 7]})
    assert meta.loss_scale == scale and meta.model_dump(include=set(COUNTERS)) == COUNTERS


@pytest.mark.parametrize(
    "counters",
    [
        *({name: value} for name in COUNTERS for value in (-1, NAN, INFINITE, "3", True, None, [3])),
        *({"loss_scale": {"scale": value}} for value in (NAN, INFINITE, "1", None)),
        *({"cursors": {"0": value}} for value in ([-1], [0.5], [NAN], [2**63], [0] * 8, 3)),
        {"mesh": {"data": "many"}},
    ],
    ids=str,
)
def test_impossible_counters_are_refused(tmp_path: Path, counters: dict[str, Any]) -> None:
    (name,) = counters
    with pytest.raises(UserError, match=f"its index is of no training run .*{name}.*; load another checkpoint"):
        saved_with(tmp_path, **counters)
