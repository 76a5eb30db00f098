"""Fact: every operation of the lists does what the real step does: GEMMs, collectives, and storages, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.config.run_spec import RunSpec
from tests.support.equality import VOCAB_SIZE
from tests.support.layout_rows import ROWS, build, name_of, pick
from tests.support.operation_record import problems

# What a list depends on, each value of which a row has.
FACTORS = ("form", "model", "folding", "dispatcher", "exchange", "overlap", "recompute", "documents")
PLACES = pick([frozenset((name, row[name]) for name in FACTORS) for row in ROWS])


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_operations_are_those_of_the_step(place: int, tmp_path: Path) -> None:
    """On the last rank, whose coordinates are not 0."""
    _, config, num_ranks = build(ROWS[place], tmp_path)
    assert problems(RunSpec(config, num_ranks, VOCAB_SIZE, num_ranks - 1)) == []
