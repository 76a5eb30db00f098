"""Fact: with fp8 linears every layout computes the numbers of one process, in float64.

The rows of a covering array (tests/support/fp8_rows.py) meet every recipe with every form, pipelines, ZeRO, context
ranks and recomputation.
"""

from __future__ import annotations

import pytest

from megatron3d.config.validate.rules import check
from megatron3d.verify.layouts import differences
from tests.support.covering import Row
from tests.support.equality import TOLERANCE, VOCAB_SIZE, configure, run_trace
from tests.support.fp8_rows import ROWS, build, is_large, name_of, reference
from tests.support.turn_ranks import run_turns


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_layout_equals_one_process(row: Row) -> None:
    case = build(row)
    assert check(case.config, case.num_ranks, VOCAB_SIZE) == []
    got = run_turns(run_trace, case.num_ranks, case.config, case.num_steps)[0]
    assert got is not None, "rank 0 has the numbers"
    assert list(differences(reference(case), got, TOLERANCE))[:3] == []


def test_the_reference_multiplies_in_fp8() -> None:
    """Against the same model without fp8 losses differ as rounding to 3 bits makes them, and no more."""
    for case in map(build, [row for row in ROWS if not is_large(row["recipe"])][:3]):
        train = {**case.alone.train.model_dump(exclude_defaults=True), "fp8": None}
        train.pop("fp8_recipe", None)
        wide = run_trace(0, 1, configure(case.alone.model.model_dump(exclude_defaults=True), {}, **train), 1)
        assert wide is not None, "one process is rank 0"
        narrow = reference(case)
        assert 1e-6 < abs(float(narrow["loss of step 1"] - wide["loss of step 1"])) < 0.05
