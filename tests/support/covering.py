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
        self._parts, self._completes = cache(self._find_parts), cache(self._can_complete)

    def allows(self, row: Row) -> bool:
        """Return whether a complete or partial row breaks no rule and can be completed."""
        return all(self._holds(row, rule) for rule in self._rules) and self._leads_on(row, set(self.factors) - set(row))

    def _holds(self, row: Row, rule: tuple[tuple[str, ...], Callable[..., bool]]) -> bool:
        """Return whether a row obeys a rule as far as the rule's factors have values."""
        names, holds = rule
        return not all(name in row for name in names) or holds(*[row[name] for name in names])

    def _leads_on(self, row: Row, left: Iterable[str]) -> bool:
        """Return whether the factors that are left can have values; parts that no rule connects do so separately."""
        return all(
            self._completes(tuple((name, row[name]) for name in near if name in row), tuple(part))
            for part, near in self._parts(frozenset(left))
        )

    def _find_parts(self, left: frozenset[str]) -> list[tuple[list[str], list[str]]]:
        """Return the parts of `left` that rules connect, each with the other factors of its rules."""
        parts: list[set[str]] = []
        for names, _ in self._rules:
            if own := left & set(names):
                touched = [part for part in parts if part & own]
                parts = [part for part in parts if part not in touched] + [set(own).union(*touched)]
        near = [{name for names, _ in self._rules if part & set(names) for name in names} - part for part in parts]
        return [(self._in_order(part), self._in_order(others)) for part, others in zip(parts, near, strict=True)]

    def _in_order(self, names: Collection[str]) -> list[str]:
        return [name for name in self.factors if name in names]

    def _can_complete(self, known: tuple[Choice, ...], part: tuple[str, ...]) -> bool:
        """Return whether the factors of a part can have values next to the known ones."""
        name, *left = part
        rules = [rule for rule in self._rules if name in rule[0]]
        rows = ({**dict(known), name: value} for value in self.factors[name])
        return any(all(self._holds(row, rule) for rule in rules) and self._leads_on(row, left) for row in rows)

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
        missing, rows = dict.fromkeys(origins), list[Row]()
        while missing or starts:
            left = Counter(choice for pair in missing for choice in pair)
            if not starts:
                first = max(missing, key=lambda pair: left[pair[0]] + left[pair[1]])
                starts = [min(origins[first], key=self._cost)]
            rows.append(self._complete_row(starts.pop(0), missing))
            for pair in self.pairs(rows[-1]):
                missing.pop(pair, None)
        return self._without_repeats(rows, len(required))

    def _without_repeats(self, rows: Sequence[Row], num_required: int) -> list[Row]:
        """Return the rows without those whose pairs all occur in others; the first ones are required."""
        found = [self.pairs(row) for row in rows]
        times = Counter(pair for pairs in found for pair in pairs)
        kept = list(rows)
        for place in sorted(range(num_required, len(rows)), key=lambda place: -self._cost(rows[place])):
            if all(times[pair] > 1 for pair in found[place]):
                times.subtract(found[place])
                kept.remove(rows[place])
        return kept

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
