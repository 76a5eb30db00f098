"""Fact: layouts on gloo processes compute the numbers of one process; the rows contain every choice of the array."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layout_rows import PROCESS_ROWS, name_of, problems
from tests.support.pool import Pool


@pytest.mark.parametrize("place", PROCESS_ROWS, ids=name_of)
def test_gloo_processes_equal_one_process(pool: Pool, tmp_path: Path, place: int) -> None:
    assert not (lines := problems(place, tmp_path, pool.run)), lines
