"""Fact: whenever a run is killed, its tracker names a complete checkpoint, and its next save cleans up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron3d.checkpoint.store import Piece, latest, load, read_index, resolve, save
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from tests.support.checkpoints import newest_intact

ONE = Mesh((("x", 1),))


def problem_of(action, path):
    """Return the one problem of the UserError that the action raises."""
    with pytest.raises(UserError) as caught:
        action(path)
    (problem,) = caught.value.problems
    return problem


def whole(tensor):
    """Return a piece that is a whole vector."""
    return Piece("w", tuple(tensor.shape), ((0, len(tensor)),), tensor)


def test_the_checkpoint_to_load(saved, tmp_path):
    run = saved.parent
    tracker = run / "latest_checkpointed_iteration.txt"
    assert latest(tmp_path / "absent") is None
    assert "there is no such folder; give a folder that a run" in problem_of(resolve, tmp_path / "absent")
    tracker.write_text("4\n")
    assert "names iter_0000004, which is not there; load one of iter_0000003" in problem_of(latest, run)
    tracker.write_text("release\n")
    assert "holds 'release', not the number of an iteration" in problem_of(resolve, run)
    tracker.unlink()
    assert latest(run) is None
    assert "there is neither latest_checkpointed" in problem_of(resolve, run)


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc")])
@pytest.mark.parametrize("suffix", ["tmp", "old", "gone"])
@pytest.mark.parametrize("iteration", [3, 4, 5])
def test_names_of_our_own_in_the_way_of_a_save(saved, run_ranks, make, suffix, iteration):
    """Whatever has the name of a leftover is removed, and what a link names stays."""
    make(saved.parent / f".iter_{iteration:07}.{suffix}")
    folder = run_ranks(ONE, lambda comm: save(saved.parent, 4, [whole(torch.ones(2))], {}, comm))[0]
    assert latest(saved.parent) == folder and Path("/etc/passwd").exists()
    assert not list(saved.parent.glob(f".*.{suffix}"))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_tracker_that_is_no_file(saved, make):
    tracker = saved.parent / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    make(tracker)
    assert "is not a file; load one of iter_0000003 by its folder" in problem_of(resolve, saved.parent)
    assert newest_intact(saved.parent) == (saved, [])


def test_a_tracker_of_other_bytes(saved):
    (saved.parent / "latest_checkpointed_iteration.txt").write_bytes(b"\xff" * 10**6)
    assert len(problem_of(resolve, saved.parent)) < 500


class Killed(BaseException):
    """Exception that no handler catches, like a signal."""


def _kill_at(monkeypatch, last):
    """Make the file-system call number `last` the first that does not happen."""
    calls = iter(range(last))

    def counted(original):
        def call(*arguments, **keywords):
            if next(calls, None) is None:
                raise Killed
            return original(*arguments, **keywords)

        return call

    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [3, 4])
def test_a_save_killed_at_any_moment_leaves_a_checkpoint(tmp_path, monkeypatch, run_ranks, iteration):
    """A run that saved iteration 3 dies at each call of its next save, of the same iteration or of another one."""

    def save_value(run, iteration, value):
        tensor = torch.full((2,), float(value))
        return lambda comm: save(run, iteration, [whole(tensor)], {"value": value}, comm)

    survived = set()
    for last in range(100):
        run = tmp_path / str(last)
        run_ranks(ONE, save_value(run, 3, 0))
        try:
            with monkeypatch.context() as patch, pytest.raises(Killed):
                _kill_at(patch, last)
                run_ranks(ONE, save_value(run, iteration, 1))
        except pytest.fail.Exception:
            break
        w = torch.full((2,), float("nan"))
        load(resolve(run), [whole(w)])
        assert w.tolist() == [read_index(resolve(run)).meta["value"]] * 2
        survived.add(w[0].item())
        run_ranks(ONE, save_value(run, 5, 2))
        assert (run / "iter_0000005").is_dir()
        assert not list(run.glob(".*")), "what the killed save left is still there"
        load(run / "iter_0000003", [whole(w)])
    assert survived == {0.0, 1.0}
