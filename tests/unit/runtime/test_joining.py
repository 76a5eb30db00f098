"""Fact: a process finds the elastic run that it joins by its folder, or is told what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.config.resolve import resolve
from megatron3d.errors import ExitCode, UserError
from megatron3d.runtime.connections import Responder
from megatron3d.runtime.epochs import Member
from megatron3d.runtime.joining import FILE_NAME, Meeting, read_meeting, write_meeting
from tests.support.tiny_run import in_run, refuse, run, write_config

MEETING = Meeting([Member(1, "10.0.0.1", 4711, 4712, "node1", 99)], 4, {"optimizer": {"lr": 0.1}, "train": {"seed": 1}})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_meeting(tmp_path, MEETING)
    assert read_meeting(tmp_path) == MEETING


def test_other_values_are_named() -> None:
    assert [*MEETING.differences({"optimizer": {"lr": 0.1}, "train": {"seed": 1}})] == []
    (problem,) = MEETING.differences({"optimizer": {"lr": 0.2}, "train": {"seed": 1}})
    assert problem == "optimizer.lr=0.2: the run that is joined has 0.1; use that"


@pytest.mark.parametrize("text", ["", "{}", '{"members": [[1]], "world_size": 4, "config": {}}'])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(UserError, match=r"members.json is damaged"):
        read_meeting(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    refuse(config, ["--join"], ("--join: needs train.elastic=true and checkpoint.save",))
    keys = ["train.elastic=true", "train.distributed_timeout_minutes=0.01"]
    outcome = run(config, *keys, "--join")
    waits, problem = outcome.err.splitlines()
    assert outcome.code == ExitCode.USER_ERROR and waits == f"> waits for the run in {tmp_path}/run to begin"
    assert "no process of a run in" in problem and "is one with train.elastic=true under way there?" in problem


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    keys = ["train.elastic=true", *in_run(str(tmp_path / "run"))]
    (tmp_path / "run").mkdir()
    values = resolve(config, keys, 1).config.model_dump(mode="json")
    write_meeting(tmp_path / "run", Meeting([Member(0, "127.0.0.1", 1, Responder().port, "node1", 99)], 1, values))
    refuse(config, [*keys, "--join", "optimizer.lr=0.5"], ("optimizer.lr=0.5", "the run that is joined"))
