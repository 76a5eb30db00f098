"""Fact: no text from outside reaches a terminal with control characters, forged lines or without bounds."""

from __future__ import annotations

import pickle
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from megatron3d.errors import MAX_LENGTH, MAX_PROBLEMS, UserError, escaped, one_line

ANY_TEXT = st.text(st.characters(codec=None))


@given(text=ANY_TEXT)
def test_escaped_text_is_harmless_and_whole(text: str) -> None:
    shown = escaped(text)
    shown.encode()
    assert {unicodedata.category(char) for char in shown if char not in "\t\n"}.isdisjoint({"Cc", "Cs", "Zl", "Zp"})
    assert not any(
        unicodedata.bidirectional(char) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
        for char in shown
    )
    assert escaped(shown) == shown
    assert text.isprintable() <= (shown == text)


@given(text=ANY_TEXT)
def test_one_line_is_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1
    assert one_line(one_line(text)) == one_line(text)


def test_examples() -> None:
    assert escaped("a\x1b[2J\rb\n\tc") == "a\\x1b[2J\\rb\n\tc"
    assert one_line("name\n> iteration 5/5 done") == "name\\n> iteration 5/5 done"
    assert one_line("\udcff \u202e \x9b31m é 漢 😀") == "\\udcff \\u202e \\x9b31m é 漢 😀"


def test_long_text_keeps_both_ends() -> None:
    shown = one_line("a" * 200_000 + "; use 5")
    assert len(shown) == MAX_LENGTH and shown.startswith("aaa") and shown.endswith("a; use 5")
    assert "[200,007 characters]" in shown


def test_a_user_error_quotes_safely() -> None:
    error = UserError("data.data_path=a\nb\x1b[0m: is absent", "second")
    assert error.problems == ("data.data_path=a\\nb\\x1b[0m: is absent", "second")
    assert str(error) == "\n".join(error.problems)
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_of_many_problems_the_first_are_kept() -> None:
    error = UserError(*(f"key{number}: unknown" for number in range(5000)))
    assert len(error.problems) == MAX_PROBLEMS + 1
    assert error.problems[-1] == "and 4,900 more problems: correct these first"
