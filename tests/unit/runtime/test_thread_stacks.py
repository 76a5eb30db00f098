"""Fact: the package's innermost frames of every thread are read, also while the threads run."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron3d.comm.interface import Pending
from megatron3d.runtime import watchdog as thread_stacks
from megatron3d.runtime.watchdog import MAX_FRAMES, PACKAGE, package_stacks


def mine() -> tuple[str, ...]:
    return package_stacks()[threading.get_ident()]


def run_as(path: Path, text: str, **names: object) -> None:
    """Run source as if it were that file."""
    exec(compile(text, str(path), "exec"), names)


def num_descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_only_frames_of_the_package_are_read() -> None:
    assert mine() == ()
    found: list[tuple[str, ...]] = []
    Pending(lambda: found.append(mine())).wait()
    assert len(found[0]) == 1 and found[0][0].startswith("comm/interface.py:") and found[0][0].endswith(" wait")


def test_the_innermost_frames_are_read_the_outer_ones_first() -> None:
    found: list[tuple[str, ...]] = []
    text = "def go(n):\n    return go(n - 1) if n else found.append(mine())\ngo(9)"
    run_as(PACKAGE / "train" / "deep.py", text, found=found, mine=mine)
    assert found == [("train/deep.py:2 go",) * MAX_FRAMES]
    text = "def inner():\n    found.append(mine())\n\ndef outer():\n    inner()\nouter()"
    run_as(PACKAGE / "two.py", text, found=found, mine=mine)
    assert found[1] == ("two.py:6 <module>", "two.py:5 outer", "two.py:2 inner")


def test_a_folder_that_is_not_ascii_is_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_stacks, "PACKAGE", Path("/home/zoë/数"))
    found: list[tuple[str, ...]] = []
    run_as(Path("/home/zoë/数/model.py"), "found.append(mine())", found=found, mine=mine)
    run_as(Path("/home/zoë/data/model.py"), "found.append(mine())", found=found, mine=mine)
    assert found == [("model.py:1 <module>",), ()]


def test_a_file_may_be_left_out() -> None:
    file, found = PACKAGE / "own.py", list[tuple[str, ...]]()
    text = "found.append(stacks(apart_from=file)[ident()])"
    run_as(file, text, found=found, stacks=package_stacks, file=str(file), ident=threading.get_ident)
    assert found == [()]


@pytest.mark.parametrize("lacks", ["descriptors", "memory files"])
def test_without_files_in_memory_there_is_another_or_none(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, os.strerror(24))

    if lacks == "descriptors":
        monkeypatch.setattr(os, "memfd_create", none_left, raising=False)
        assert package_stacks() == {}
    else:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        assert threading.get_ident() in package_stacks()


def test_threads_run_while_others_read_them() -> None:
    """Two readers and a thread whose frames come and go; every text is whole, and no descriptor is left open."""
    end, read = time.monotonic() + 1.0, list[dict[int, tuple[str, ...]]]()
    before = sys.getswitchinterval()

    def busy() -> None:
        text = (
            "def go(n):\n    return go(n - 1) + sum(i for i in range(3)) if n else 0\nwhile clock() < end:\n    go(20)"
        )
        run_as(PACKAGE / "busy.py", text, clock=time.monotonic, end=end)

    def reader() -> None:
        while time.monotonic() < end:
            read.append(package_stacks())

    descriptors = num_descriptors()
    threads = [threading.Thread(target=run) for run in (busy, reader, reader)]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    of_busy = [stacks[ident] for stacks in read if (ident := threads[0].ident) in stacks]
    assert any(stack and stack[-1].startswith("busy.py:2 ") for stack in of_busy)
    assert num_descriptors() <= descriptors
