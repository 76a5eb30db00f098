"""Fact: names and prose use the words of docs/glossary.md; the worst others and telegram docstrings are refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFUSED = re.compile(
    r"\b(reckon\w*|for ever|anew|at one time|inside of|so many|setbacks?|(shar(e|es|ed|ing)) out|computed again"
    r"|put(s|ting)? off|number types?|grad[_ ]sinks?|idle part|queued? again"
    r"|under the product|summed up|meet the others|part of the pipeline|part of the batch)\b"
    r"|(?<![\".-])\b(processors?|micro-batch(es)?)\b(?!-size| =|\(|\.\w|\")".replace(" ", r"\s+"),
    re.IGNORECASE,
)
OPENING = re.compile(r"(Of|With|The same|Both)\b")
# The glossary lists the refused words.
EXEMPT = ("docs/glossary.md", "tests/test_words.py")


def sources() -> Iterator[Path]:
    """Yield every file with code or prose to check."""
    for pattern in ("*.md", "*.py", "*/*.md", "[mtb]*/**/*.py", "configs/**/*.yaml", "scripts/**/*.sh"):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(EXEMPT):
                yield path


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a Python file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words_are_those_of_the_glossary(path: Path) -> None:
    texts = docstrings(path) if path.suffix == ".py" else []
    words = texts if "tests" in path.parts else [path.read_text(encoding="utf-8")]
    assert [match[0] for text in words for match in REFUSED.finditer(text)] == []
    assert [text.splitlines()[0] for text in texts if OPENING.match(text)] == []


def test_the_patterns_find_their_examples() -> None:
    assert REFUSED.search("what ranks share\n  out") and OPENING.match("Of a rank.") and not OPENING.match("Offsets.")
