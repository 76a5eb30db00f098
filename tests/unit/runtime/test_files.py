"""Fact: files and folders appear whole or not at all, and a lock is refused to a second holder until it is closed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megatron3d.runtime.files import hidden, new_folder, open_locked, replace_file, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_text(path, "ä")
    with pytest.raises(KeyboardInterrupt), replace_file(path) as file:
        file.write(b"new")
        assert names(tmp_path) == [".x.json.tmp", "x.json"]
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "ä" and names(tmp_path) == ["x.json"]


def test_a_pipe_or_device_is_written_to_and_stays(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_text(path, "whole")
    reader.join()
    assert read == [b"whole"] and path.is_fifo() and names(tmp_path) == ["pipe"]
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")


def test_a_folder_appears_when_the_block_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "x"
    hidden(folder).mkdir(parents=True)
    (hidden(folder) / "left by a killed attempt").touch()
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as temporary:
        assert names(temporary) == []
        raise KeyboardInterrupt
    assert names(folder.parent) == []
    with new_folder(folder) as temporary:
        (temporary / "a").touch()
        assert not folder.exists()
    assert names(folder) == ["a"] and names(folder.parent) == ["x"]


def test_a_lock_keeps_the_content_and_refuses_a_second_holder(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"content")
    with open_locked(path) as first:
        with pytest.raises(BlockingIOError, match=r"locked by another process.*x"):
            open_locked(path)
        assert first.readall() == b"content"
    open_locked(path).close()
