"""Fact: the package's innermost frames of every thread are read, also while the threads run."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from megatron3d.comm.interface import Pending
from megatron3d.runtime import watchdog as thread_stacks
from megatron3d.runtime.watchdog import MAX_FRAMES, PACKAGE, package_stacks


def mine() -> tuple[str, ...]:
    return package_stacks()[threading.get_ident()]


def run_as(path: Path, text: str, **names: object) -> None:
    """Run source as if it were that file."""
    exec(compile(text, str(path), "exec"), names)


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


def test_a_read_leaves_the_interpreter_as_it_was() -> None:
    """Bug that this finds: a run that collects garbage itself (`train.manual_gc`) collects at any time after a read."""
    before, found = sys.getswitchinterval(), list[tuple[bool, float]]()
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            package_stacks()
            found.append((gc.isenabled(), sys.getswitchinterval()))
        finally:
            gc.enable()
    assert found == [(True, before), (False, before)]


def test_no_garbage_is_collected_while_frames_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug that this finds: `f_back` makes an object, the collector runs, and other threads free the frame meanwhile."""
    seen: list[tuple[bool, float]] = []
    frames = sys._current_frames

    def watched() -> dict[int, FrameType]:
        seen.append((gc.isenabled(), sys.getswitchinterval()))
        return frames()

    monkeypatch.setattr(sys, "_current_frames", watched)
    package_stacks()
    [(enabled, interval)] = seen
    assert not enabled and interval == pytest.approx(thread_stacks.SWITCH_S)


def test_threads_run_while_others_read_them() -> None:
    """Two readers and a thread whose frames come and go; every stack is whole."""
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
            time.sleep(0)

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
