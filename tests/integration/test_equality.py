"""Fact: every layout computes the numbers of one process: losses, norms, gradients and parameters, in float64.

The rows of a covering array (tests/support/layout_rows.py) run on threads that take turns (turn_ranks.py),
ten times faster than on processes, and stricter.  test_gloo_equality.py runs some of them on processes, and tests/slow
the whole matrix, with --full.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from pathlib import Path

import pytest

from megatron3d.config.validate.rules import check
from megatron3d.parallel.modes import MODES
from megatron3d.pipeline.schedules import FROM_FILE, SCHEDULES
from megatron3d.verify.layouts import differences
from tests.support.covering import Row
from tests.support.equality import MODELS, TOLERANCE, VOCAB_SIZE, reference, run_trace, wrong
from tests.support.layout_rows import FACTORS, NORM_ROWS, ROWS, TABLE, WITH_MODULES, build, name_of, problems, rule_of
from tests.support.turn_ranks import run_turns


@pytest.mark.parametrize("place", range(len(ROWS)), ids=name_of)
def test_a_layout_equals_one_process(tmp_path: Path, place: int) -> None:
    assert not (lines := problems(place, tmp_path, run_turns)), lines


@pytest.mark.parametrize("row", NORM_ROWS, ids=lambda row: f"{'-'.join(row['form'])}-{row['model']}")
def test_norms_that_are_recomputed_equal_one_process(tmp_path: Path, row: Row) -> None:
    model, config, num_ranks = build(row, tmp_path)
    assert check(config, num_ranks, VOCAB_SIZE) == []
    trace = run_turns(run_trace, num_ranks, config, 1)[0]
    assert trace is not None, "rank 0 has the numbers"
    assert not (lines := wrong([(model, config)], [trace], num_steps=1)), lines


def test_every_row_keeps_the_rules_of_a_run(tmp_path: Path) -> None:
    for row in ROWS:
        _, config, num_ranks = build(row, tmp_path)
        assert check(config, num_ranks, VOCAB_SIZE) == [], row


def test_every_feasible_pair_is_covered() -> None:
    """The pairs come from the rules alone, so that infeasible pairs are distinguished from forgotten ones."""
    covered = {pair for row in ROWS for pair in TABLE.pairs(row)}
    assert set(TABLE.feasible_pairs()) == covered
    for a, b in combinations(("form", "schedule", "ZeRO", "model", "recompute"), 2):
        pairs = set(product(FACTORS[a], FACTORS[b]))
        if (a, b) == ("model", "recompute"):  # modules of experts are recomputed in models that have them
            pairs = {(model, modules) for model, modules in pairs if model in WITH_MODULES.get(modules, MODELS)}
        assert {(row[a], row[b]) for row in ROWS} == pairs, f"{a} x {b}"


def test_every_entry_of_the_registries_occurs() -> None:
    """Every mode in every form and shape, and every schedule on 2 and on 4 pipeline ranks, occurs."""
    for mode, entry in MODES.items():
        for form in entry.forms:
            met = {row["shape"] for row in ROWS if row["form"] == (mode, form)}
            assert {math.prod(shape) for shape in met} >= {2, 4, 8}
            assert any(min(shape) > 1 for shape in met), f"{mode} {form}: no layout has all axes above 1"
            assert len(entry.axis_names) == 1 or any(len(set(shape)) > 1 for shape in met)
    met = {(row["pipeline ranks"], row["schedule"][0]) for row in ROWS}
    assert met >= set(product((2, 4), (*SCHEDULES, FROM_FILE)))


@pytest.mark.parametrize("factor", ["form", "ZeRO", "replicas", "folding", "pipeline ranks", "context ranks", "model"])
def test_every_layout_of_parameters_occurs_with_muon(factor: str) -> None:
    """Its exchange depends on all that divides parameters, and on their kinds."""
    met = {ROWS[place][factor] for place in range(len(ROWS)) if rule_of(place).startswith("muon")}
    assert met == set(FACTORS[factor])


def test_the_comparison_finds_a_wrong_gradient() -> None:
    """A comparison that cannot fail proves nothing, so that a wrong gradient must fail it."""
    expected = reference(next(iter(MODELS)), 2, 4)
    name = next(name for name in expected if "mlp.fc2.weight" in name)
    got = {**expected, name: expected[name] * (1 + 1e-9)}
    assert [line.partition(":")[0] for line in differences(expected, got, TOLERANCE)] == [name]
