"""Fact: the configuration page lists every key and equals the schema; keys that the documentation quotes exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron3d.config.read import SECTIONS, expected, read
from tools import show_config

ROOT = Path(__file__).parents[3]
KEYS = {f"{section}.{name}" for section, names in SECTIONS.items() for name in names}


def test_the_page_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == show_config.page() + "\n", "python tools/show_config.py > docs/configuration.md"


def test_every_key_is_on_it() -> None:
    keys = re.findall(r"^\| \[?`(\w+)`(?:\]\(\w+\.md\))? \|", show_config.page(), re.M)
    assert sorted(keys) == sorted(key.partition(".")[2] for key in KEYS)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_has_a_description_of_its_values(key: str) -> None:
    """The message for a wrong type names the accepted values, also where they are numbers."""
    section, _, name = key.partition(".")
    assert expected(section, name, "something")
    reading = read(ROOT / "configs" / "quickstart.yaml", [f"{key}={{a: 1}}"])
    assert any(problem.startswith(f"{key}={{a: 1}}") or key in problem for problem in reading.problems)


def test_numbers_outside_a_choice_are_refused() -> None:
    reading = read(ROOT / "configs" / "quickstart.yaml", ["parallel.zero_stage=7"])
    assert reading.problems == ("parallel.zero_stage=7 (command line): not allowed; use 0, 1, 2 or 3",)


def test_keys_for_newcomers_exist() -> None:
    """Keys that coming_from.md maps other frameworks' options to exist, with values that they accept."""
    rows = [line for line in (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    ours = "|".join(row.split("|", 2)[2] for row in rows)
    named = re.findall(r"`(\w+\.\w+)(=[^`]*)?`", ours)
    assert len({key for key, _ in named}) > 50 and {key for key, _ in named} - KEYS == set()
    assert read(ROOT / "configs" / "quickstart.yaml", [key + value for key, value in named if value]).problems == ()
