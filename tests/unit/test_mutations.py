"""Fact: every seeded bug of tests/mutations.py still applies: its snippet occurs once, and the result compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import COPIED, MUTATIONS, ROOT, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutant_compiles(mutation: Mutation) -> None:
    compile(mutated(mutation), mutation.module, "exec")


def test_mutants_have_unique_names() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
    assert all((ROOT / name).exists() for name in COPIED)


def test_a_missing_snippet_is_reported(tmp_path: Path) -> None:
    (tmp_path / "megatron3d").mkdir()
    (tmp_path / "megatron3d" / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"megatron3d/a\.py has 2 times"):
        mutated(Mutation("a", "a.py", "x = 1", "x = 2"), tmp_path)
