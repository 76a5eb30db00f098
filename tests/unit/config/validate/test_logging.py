"""Fact: traces and profiles need iterations and ranks of the run and a folder; each message gives valid values."""

from __future__ import annotations

from typing import Any

from megatron3d.config.schema import Config
from megatron3d.config.validate.rules import check


def problems(save: str | None, **logging: Any) -> list[str]:
    train = {"train_iters": 8, "global_batch_size": 2}
    return check(Config.model_validate({"train": train, "checkpoint": {"save": save}, "logging": logging}), 2, 257)


def test_a_profile_needs_iterations_ranks_and_a_folder() -> None:
    assert problems(None, profile=True, profile_step_start=9, profile_step_end=9, profile_ranks=[0, 2]) == [
        "logging.profile=true: no folder to write profiles to; set checkpoint.save, or leave it out",
        "logging.profile_step_end=9: profiling starts at iteration 9 and stops before this one; use 10 or more",
        "logging.profile_ranks=[0,2]: rank 2 is not one of the 2 ranks; use 0 to 1",
    ]
    assert problems("run", profile=True, profile_step_start=8, profile_step_end=9, profile_ranks=[1]) == []
