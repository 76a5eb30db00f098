"""Fact: a job is requeued exactly if another launch can progress, by the table of exit codes and the job's history."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.launch.requeue import (
    MAX_FRUITLESS,
    decide_requeue,
    newest_iteration,
    record_launch,
    run_folder,
    start_iterations,
)
from megatron3d.runtime.launcher_env import SlurmJob

KILLED = 137


@pytest.mark.parametrize(
    ("code", "before_limit", "again", "words"),
    [
        (0, False, False, "done"),
        (0, True, False, "done"),
        (2, False, False, "the configuration or its files are wrong"),
        (2, True, False, "the configuration or its files are wrong"),
        (3, False, False, "stopped on request"),
        (3, True, True, "the time limit is near; the next launch continues from iteration 8"),
        (1, False, True, "it ended with code 1"),
        (KILLED, False, True, "it ended with code 137"),
        (1, True, True, "the time limit is near"),
    ],
)
def test_a_launch_with_progress_is_requeued(code: int, before_limit: bool, again: bool, words: str) -> None:
    decided, why = decide_requeue(code, before_limit, [0, 4], newest=8)
    assert decided == again and words in why


@given(code=st.sampled_from([1, 3, KILLED]), steps=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_a_job_is_requeued_until_two_launches_save_nothing(code: int, steps: list[int]) -> None:
    """Each launch saves `step` more iterations; the job is requeued until two in a row save none."""
    begun: list[int] = []
    newest, idle = 0, 0
    for step in steps:
        begun.append(newest)
        newest += step
        idle = 0 if step else idle + 1
        again, why = decide_requeue(code, True, begun, newest)
        assert again == (idle < MAX_FRUITLESS), why
        if not again:
            assert f"nothing beyond iteration {newest}" in why
            return


def test_a_launch_that_was_not_recorded_is_the_last() -> None:
    assert decide_requeue(1, False, [], 8) == (
        False,
        "not requeued: it ended with code 1 before its launch could be recorded",
    )


def slurm_job(job: int, num_requeues: int) -> SlurmJob:
    return SlurmJob(job, num_requeues, 0, "n1", "n[1-2]")


def test_a_job_counts_only_its_own_launches(tmp_path: Path) -> None:
    """The log is in the run's folder, which is created; a line cut off by a kill does not count as a launch."""
    root = tmp_path / "runs" / "a"
    assert record_launch(root, slurm_job(7, 0)).iteration == 0
    (root / "iter_0000040").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("40\n")
    (root / "iter_0000050").mkdir()
    assert newest_iteration(root) == 40, "a save that was not finished does not count"
    record_launch(root, slurm_job(8, 0))
    with (root / "slurm.jsonl").open("a") as file:
        file.write('{"job": 7, "requ')
    assert start_iterations(root, slurm_job(7, 0)) == [0] and start_iterations(root, slurm_job(7, 1)) == []
    record_launch(root, slurm_job(7, 1))
    assert start_iterations(root, slurm_job(7, 1)) == [0, 40] and start_iterations(root, slurm_job(8, 0)) == [40]


@pytest.mark.parametrize(
    "line",
    ["[]", '{"job": 7}', '{"job":7,"requeue":0,"nodes":"n","iteration":-1,"time":""}', "[" * 100_000, "9" * 5000],
)
def test_a_damaged_log_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "slurm.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"slurm\.jsonl:1: not (JSON|a record of a run)"):
        start_iterations(tmp_path, slurm_job(7, 0))


@pytest.mark.parametrize("checkpoint", [{}, {"save": "a"}, {"load": "a"}])
def test_a_run_that_would_not_continue_itself_is_refused(checkpoint: dict[str, str]) -> None:
    with pytest.raises(UserError, match="set both to one folder"):
        run_folder(Config.model_validate({"checkpoint": checkpoint}))


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("load", ["a", "b"])
def test_a_run_that_starts_from_another_is_its_own_afterwards(load: str, finetune: bool) -> None:
    checkpoint = {"save": "a", "load": load, "finetune": finetune}
    assert run_folder(Config.model_validate({"checkpoint": checkpoint})) == Path("a")
