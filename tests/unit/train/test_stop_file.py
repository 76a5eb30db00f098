"""Fact: a step never waits for the folder in which the file `stop` is looked for, and errors there do not end a run."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from megatron3d.train.loop import StopFile


def test_a_folder_that_does_not_answer_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: rank 0 looks between two steps, and a stalled metadata server stalls all ranks."""
    answer, real = threading.Event(), Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> object:
        if path.name == "stop":
            answer.wait(20)
        return real(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(StopFile, "INTERVAL_S", 0.01)
    (tmp_path / "stop").touch()
    begin_s = time.monotonic()
    with StopFile(tmp_path) as stop_file:
        assert not stop_file.is_found and time.monotonic() - begin_s < 5
        answer.set()
        wait_until_found(stop_file)
    assert not (tmp_path / "stop").exists()


def test_a_fault_of_the_folder_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug that this finds: EIO of a folder that comes back a moment later crashes the run."""
    faults, real = iter([errno.EIO, errno.ESTALE, errno.EACCES]), Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> object:
        if path.name == "stop" and (number := next(faults, None)):
            raise OSError(number, "Input/output error")
        return real(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(StopFile, "INTERVAL_S", 0.01)
    (tmp_path / "stop").touch()
    with StopFile(tmp_path) as stop_file:
        wait_until_found(stop_file)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"> {tmp_path}/stop cannot be looked for (Input/output error); signals stop the run as well",
        f"> stopping: found {tmp_path}/stop",
    ]


def wait_until_found(stop_file: StopFile) -> None:
    end_s = time.monotonic() + 20
    while not stop_file.is_found:
        assert time.monotonic() < end_s, "the file is not found"
        time.sleep(0.01)
