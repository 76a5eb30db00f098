"""Fact: one run at a time saves to a folder, a second one learns the owner, and a killed owner leaves no lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from megatron3d.checkpoint.publish import FolderLock
from megatron3d.errors import UserError, is_machine_fault


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("megatron3d.runtime.files.WAITS_S", (0.01, 0.01))


OWNER = """
import sys, time
from pathlib import Path
from megatron3d.checkpoint.publish import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_another_process_is_named_and_its_lock_dies_with_it(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "locked\n"
    with owner, pytest.raises(OSError, match="is saving") as caught:
        try:
            FolderLock(tmp_path)
        finally:
            owner.send_signal(signal.SIGKILL)
    assert caught.value.filename == str(tmp_path) and is_machine_fault(caught.value), "another launch may succeed"
    assert str(caught.value.strerror).startswith(f"process {owner.pid} on {socket.gethostname()} is saving")
    assert owner.returncode == -signal.SIGKILL
    FolderLock(tmp_path).release()


def test_a_released_folder_can_be_locked_again(tmp_path):
    lock = FolderLock(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(OSError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    assert (tmp_path / ".lock").read_text() == ""
    FolderLock(tmp_path).release()


def test_a_lock_that_is_released_meanwhile_is_taken(tmp_path, monkeypatch):
    """An earlier launch of the run ends while the next one tries again."""
    lock = FolderLock(tmp_path)
    monkeypatch.setattr("megatron3d.runtime.files.time.sleep", lambda _: lock.release())
    FolderLock(tmp_path).release()


def test_an_owner_that_is_no_text(tmp_path):
    lock = FolderLock(tmp_path)
    (tmp_path / ".lock").write_bytes(b"\xff" * 10**6)
    with pytest.raises(OSError, match="is saving to this folder") as caught:
        FolderLock(tmp_path)
    assert len(str(caught.value)) < 2000
    lock.release()


def test_a_fifo_in_place_of_the_lock(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(UserError, match=r"\.lock cannot be locked \(not a regular file\)"):
        FolderLock(tmp_path)


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock cannot be locked \(Is a directory\); save to a folder that you own"):
        FolderLock(tmp_path)
