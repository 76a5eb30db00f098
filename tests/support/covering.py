"""Covering arrays: a small set of rows in which every feasible pair of choices appears.

Rows are built one at a time, as in AETG (Cohen et al. 1997, IEEE Trans. Softw. Eng. 23(7)): start from a missing pair,
then give every other factor the choice that covers the most missing pairs and can still be completed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

Choice = tuple[str, Any]  # (factor, value), or (aspect, what the aspect is for the value)
Pair = tuple[Choice, Choice]
Row = Mapping[str, Any]  # one value per factor


class Rule(NamedTuple):
    """Predicate over the values of some factors."""

    names: tuple[str, ...]
    holds: Callable[..., bool]


class Table:
    """Factors with their values, and the rules that a complete row must satisfy.

    Args:
        aspects: for a pair of factors (a, b), the property of a value of `a` that must meet every value of `b`; by
            default the value itself.
        cost: cost of running a complete or partial row; among choices that cover equally many pairs the cheapest wins.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        rules: Sequence[Rule],
        aspects: Callable[[str, Any, str], Iterable[Choice]] = lambda name, value, other: [(name, value)],
        cost: Callable[[Row], float] = len,
    ) -> None:
        self.factors, self._aspects, self._cost = factors, aspects, cost
        self._places = {name: place for place, name in enumerate(factors)}
        self._rules = [(rule.names, cache(rule.holds)) for rule in rules]
        ruled = {name for rule in rules for name in rule.names}
        self._ruled = [name for name in factors if name in ruled]
        self._completes = cache(self._can_complete)

    def allows(self, row: Row) -> bool:
        """Return whether a complete or partial row breaks no rule and can be completed."""
        return self._completes(tuple((name, row[name]) for name in self._ruled if name in row))

    def _can_complete(self, chosen: tuple[Choice, ...]) -> bool:
        row = dict(chosen)
        for names, holds in self._rules:
            if all(name in row for name in names) and not holds(*(row[name] for name in names)):
                return False
        name = next((name for name in self._ruled if name not in row), None)
        return name is None or any(self.allows({**row, name: value}) for value in self.factors[name])

    def pairs(self, row: Row) -> set[Pair]:
        """Return the pairs of choices in a complete or partial row."""
        names = [name for name in self.factors if name in row]
        return {pair for a, b in combinations(names, 2) for pair in self._meet((a, row[a]), (b, row[b]))}

    def _meet(self, one: Choice, other: Choice) -> list[Pair]:
        if self._places[one[0]] > self._places[other[0]]:
            return self._meet(other, one)
        return list(product(self._aspects(*one, other[0]), self._aspects(*other, one[0])))

    def feasible_pairs(self) -> dict[Pair, list[Row]]:
        """Return every pair of choices that some valid row contains, mapped to two factor values that produce it."""
        found: dict[Pair, list[Row]] = {}
        for a, b in combinations(self.factors, 2):
            for one, other in product(self.factors[a], self.factors[b]):
                if self.allows({a: one, b: other}):
                    for pair in self._meet((a, one), (b, other)):
                        found.setdefault(pair, []).append({a: one, b: other})
        return found

    def covering_rows(self, required: Sequence[Row] = ()) -> list[Row]:
        """Return rows that together contain every feasible pair: completions of the required partial rows, then those
        that cover the most pairs first.
        """
        origins, starts = self.feasible_pairs(), list(required)
        missing, rows = dict.fromkeys(origins), []
        while missing or starts:
            left = Counter(choice for pair in missing for choice in pair)
            if not starts:
                first = max(missing, key=lambda pair: left[pair[0]] + left[pair[1]])
                starts = [min(origins[first], key=self._cost)]
            rows.append(self._complete_row(starts.pop(0), missing))
            for pair in self.pairs(rows[-1]):
                missing.pop(pair, None)
        return rows

    def _complete_row(self, start: Row, missing: Collection[Pair]) -> Row:
        """Complete a partial row: give each factor in turn the value that covers the most pairs, then the cheapest."""
        row = dict(start)

        def rank(choice: Choice) -> tuple[float, float]:
            gain = sum(pair in missing for other in row.items() for pair in self._meet(other, choice))
            return -gain, self._cost(dict([*row.items(), choice]))

        while open_names := [name for name in self.factors if name not in row]:
            choices = sorted(((name, value) for name in open_names for value in self.factors[name]), key=rank)
            row.update([next(choice for choice in choices if self.allows(dict([*row.items(), choice])))])
        return row
