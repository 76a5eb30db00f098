"""Fact: inference has the run's layout of experts under a launcher, another one if asked, and none on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron3d.errors import UserError
from megatron3d.inference.load import read_run
from tests.support.equality import MODELS, configure

MODEL = {**MODELS["experts, shared experts, losses of routers"], "vocab_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of a run whose experts are distributed over 2 ranks."""
    asked = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    config = configure(MODEL, asked, micro_batch_size=2, global_batch_size=8)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return tmp_path / "iter_1"


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 1, (1, 1, None)),
        ([], 2, (2, 1, "alltoall")),
        (["parallel.expert_model_parallel_size=1"], 2, (1, 1, None)),
        (
            ["parallel.expert_model_parallel_size=4", "parallel.moe_token_dispatcher_type=allgather"],
            4,
            (4, 1, "allgather"),
        ),
        (["parallel.expert_tensor_parallel_size=2"], 4, (2, 2, "alltoall")),
    ],
)
def test_the_layout_of_experts(
    folder: Path, overrides: list[str], world_size: int, expected: tuple[int, int, str | None]
) -> None:
    found = read_run(folder, overrides, world_size).parallel
    sizes = found.expert_model_parallel_size, found.expert_tensor_parallel_size
    assert (*sizes, found.moe_token_dispatcher_type) == expected


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        ([], 3, "expert_model_parallel_size=2: .*; use 1"),
        (
            ["parallel.moe_token_dispatcher_type=alltoall"],
            1,
            "expert_model_parallel_size=2: .* divide no axis .*; use 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, overrides: list[str], world_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_run(folder, overrides, world_size)
