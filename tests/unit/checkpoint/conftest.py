"""A checkpoint that two ranks saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.checkpoint.store import Piece, save
from megatron3d.parallel.mesh import Mesh
from tests.support.thread_ranks import ObjectThreadComm, run_on_threads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save iteration 3 with `w` = [[0, 1], [2, 3], [4, 5]], the first row from rank 0 and the others from rank 1."""
    w = torch.arange(6.0).reshape(3, 2)

    def save_rows(comm: ObjectThreadComm) -> Path:
        low, high = ((0, 1), (1, 3))[comm.mesh.rank]
        return save(tmp_path / "run", 3, [Piece("w", (3, 2), ((low, high), (0, 2)), w[low:high])], {"a": 1}, comm)

    return run_on_threads(Mesh((("x", 2),)), save_rows)[0]
