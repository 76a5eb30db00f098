"""A text corpus, and its token files from an uninterrupted preprocessing job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.preprocess_jobs import corpus, documents, run, write_jsonl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", documents())


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    assert run(source, source.parent / "expected") == 0
    return corpus(source.parent / "expected")
