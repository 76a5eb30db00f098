"""Fact: a covering array has every pair of choices that some valid row has, and no row that breaks a rule."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import Rule, Table

NAMES = "abcdef"
VALUES = range(3)
# Rules over two or three factors, given as the combinations that they forbid.
RULES = st.lists(
    st.sampled_from([names for count in (2, 3) for names in combinations(NAMES, count)]).flatmap(
        lambda names: st.tuples(
            st.just(names), st.frozensets(st.tuples(*[st.sampled_from(VALUES)] * len(names)), max_size=8)
        )
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(RULES)
def test_all_feasible_pairs(forbidden: list[tuple[tuple[str, ...], frozenset[tuple[int, ...]]]]) -> None:
    table = Table(
        dict.fromkeys(NAMES, VALUES),
        [Rule(names, lambda *values, not_these=not_these: values not in not_these) for names, not_these in forbidden],
    )
    whole = (dict(zip(NAMES, values, strict=True)) for values in product(VALUES, repeat=len(NAMES)))
    valid = [
        row
        for row in whole
        if all(tuple(row[name] for name in names) not in not_these for names, not_these in forbidden)
    ]
    rows = table.covering_rows()
    assert all(row in valid for row in rows)
    assert set().union(*map(table.pairs, rows)) == set().union(*map(table.pairs, valid))
    assert len(rows) <= len(valid)
