"""Fact: prose uses the words of docs/glossary.md, no telegram style, and mentions files that exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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
PYTHON_FILE = re.compile(r"(?<![\w/.$])(?:\.{1,2}/)*((?:[\w-]+/)*[\w-]+\.py)\b")
# Files of other projects: Megatron-LM, AxoNN, nanoGPT.
FOREIGN = re.compile(r"megatron/.*|comm_model\.py|config/train_\w+\.py|(sample|prepare)\.py")
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


def prose(path: Path) -> str:
    """Return what a file says to its readers: of Python docstrings and comments, of other files everything."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"https?://\S+", "", text)
    comments = (t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT)
    return re.sub(r"https?://\S+", "", "\n".join([*docstrings(path), *comments]))


def ends_of_paths() -> set[str]:
    """Return every Python file of the repository by its path, and by each end of it."""
    parts = [path.relative_to(ROOT).parts for path in ROOT.glob("*.py")]
    parts += [path.relative_to(ROOT).parts for path in ROOT.glob("[mtbs]*/**/*.py")]
    return {"/".join(each[start:]) for each in parts for start in range(len(each))}


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words_are_those_of_the_glossary(path: Path) -> None:
    texts = docstrings(path) if path.suffix == ".py" else []
    words = texts if "tests" in path.parts else [path.read_text(encoding="utf-8")]
    assert [match[0] for text in words for match in REFUSED.finditer(text)] == []
    assert [text.splitlines()[0] for text in texts if OPENING.match(text)] == []


def test_files_that_are_mentioned_exist() -> None:
    ends, missing = ends_of_paths(), []
    for path in sources():
        if "tests" not in path.parts:
            named = set(PYTHON_FILE.findall(prose(path))) - ends
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in named if not FOREIGN.fullmatch(name)]
    assert missing == []


def test_a_file_is_found_in_prose() -> None:
    assert PYTHON_FILE.findall("(`ops/norm.py`), see ../megatron3d/comm/interface.py.  not.python") == [
        "ops/norm.py",
        "megatron3d/comm/interface.py",
    ]


def test_the_patterns_find_their_examples() -> None:
    assert REFUSED.search("what ranks share\n  out") and OPENING.match("Of a rank.") and not OPENING.match("Offsets.")
