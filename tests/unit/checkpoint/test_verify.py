"""Fact: every changed byte of a checkpoint is detected, and a restart resumes from the newest undamaged one."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from megatron3d.checkpoint.publish import move_tracker_back
from megatron3d.checkpoint.store import Piece, latest, load, save, verify
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from tests.support.checkpoints import newest_intact

TWO = Mesh((("x", 2),))
TRACKER = "latest_checkpointed_iteration.txt"


def flip(path, place, bit=0):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def save_rows(run_ranks, root, iteration, value=0.0):
    """Save `w` filled with `value`, one row from the first rank and two from the second."""
    w = torch.full((3, 2), value)

    def rows(comm):
        low, high = ((0, 1), (1, 3))[comm.mesh.rank]
        return save(root, iteration, [Piece("w", (3, 2), ((low, high), (0, 2)), w[low:high])], {}, comm)

    return run_ranks(TWO, rows)[0]


def test_every_flipped_bit_is_found(saved):
    """For any bit of both files, header or data, the file or the box is named."""
    assert verify(saved) == ()
    choose = random.Random(0)
    for path in sorted(saved.glob("*.safetensors")):
        content = path.read_bytes()
        for place in range(len(content)):
            flip(path, place, choose.randrange(8))
            problems = verify(saved)
            header = int.from_bytes(content[:8], "little")
            if not problems:
                assert 8 <= place < 8 + header, f"byte {place} of the numbers"
                loaded = torch.zeros(3, 2)
                load(saved, [Piece("w", (3, 2), ((0, 3), (0, 2)), loaded)])
                assert torch.equal(loaded, torch.arange(6.0).reshape(3, 2)), "the change changes nothing"
            assert all(path.name in problem for problem in problems)
            path.write_bytes(content)


def test_a_flipped_bit_is_found_where_a_box_is_read_whole(saved):
    flip(saved / "rank_00001.safetensors", -1)
    w = torch.zeros(3, 2)
    with pytest.raises(UserError) as caught:
        load(saved, [Piece("w", (3, 2), ((0, 2), (0, 2)), w[:2]), Piece("w", (3, 2), ((2, 3), (0, 2)), w[2:])])
    (problem,) = caught.value.problems
    assert "rank_00001.safetensors: w[1:3,0:2] is damaged" in problem and "load another checkpoint" in problem
    load(saved, [Piece("w", (3, 2), ((0, 2), (0, 2)), w[:2])])


def test_ranks_share_the_reading(saved):
    flip(saved / "rank_00001.safetensors", -1)
    assert verify(saved, (0, 2)) == () and len(verify(saved, (1, 2))) == 1


@pytest.fixture
def run(tmp_path, run_ranks):
    """Return the folder of a run with checkpoints 1 to 4."""
    for iteration in range(1, 5):
        save_rows(run_ranks, tmp_path / "run", iteration, float(iteration))
    return tmp_path / "run"


def test_the_newest_undamaged_checkpoint_is_found(run):
    folders = [run / f"iter_000000{i}" for i in range(1, 5)]
    flip(folders[3] / "rank_00000.safetensors", -3)
    (folders[2] / "index.json").unlink()
    (run / ".iter_0000005.tmp").mkdir()
    good, passed = newest_intact(run)
    assert good == folders[1]
    assert [folder for folder, _ in passed] == [folders[3], folders[2]]
    assert "rank_00000.safetensors: w[0:1,0:2] is damaged" in passed[0][1] and "no index.json" in passed[1][1]


def test_checkpoints_later_than_the_tracker_are_ignored(run):
    (run / TRACKER).write_text("3")
    good, passed = newest_intact(run)
    assert good == run / "iter_0000003"
    ((folder, why),) = passed
    assert folder == run / "iter_0000004" and "latest_checkpointed_iteration.txt names 3" in why


@pytest.mark.parametrize("tracker", ["", "release", None])
def test_without_a_tracker_every_checkpoint_is_considered(run, tracker):
    (run / TRACKER).unlink() if tracker is None else (run / TRACKER).write_text(tracker)
    assert newest_intact(run) == (run / "iter_0000004", [])


def test_no_undamaged_checkpoint_is_found(run, tmp_path):
    assert newest_intact(tmp_path / "absent") == (None, [])
    assert newest_intact(run / TRACKER) == (None, [])
    for folder in run.glob("iter_*"):
        (folder / "rank_00001.safetensors").unlink()
    good, passed = newest_intact(run)
    assert good is None and len(passed) == 4


def test_a_checkpoint_that_a_killed_save_was_replacing_is_found(run):
    """A run that saves an iteration again is killed between two renames."""
    (run / "iter_0000004").rename(run / ".iter_0000004.old")
    assert newest_intact(run) == (run / ".iter_0000004.old", [])
    shutil.copytree(run / ".iter_0000004.old", run / "iter_0000004")
    assert newest_intact(run) == (run / "iter_0000004", [])


def test_the_newer_of_permanent_and_non_persistent_is_found(run, run_ranks):
    save_rows(run_ranks, run / "non_persistent", 6)
    assert newest_intact(run) == (run / "non_persistent" / "iter_0000006", [])
    save_rows(run_ranks, run, 6)
    assert newest_intact(run) == (run / "iter_0000006", [])
    flip(run / "iter_0000006/rank_00000.safetensors", -1)
    assert newest_intact(run)[0] == run / "non_persistent" / "iter_0000006"


def test_a_rolled_back_run_ignores_later_checkpoints(run, run_ranks):
    """Later checkpoints are ignored until they are saved again."""
    save_rows(run_ranks, run / "non_persistent", 5)
    move_tracker_back(run, 2)
    assert latest(run) == run / "iter_0000002"
    good, passed = newest_intact(run)
    assert good == run / "iter_0000002"
    assert [folder for folder, _ in passed] == [run / "iter_0000004", run / "iter_0000003"]
    save_rows(run_ranks, run, 3, 9.0)
    assert latest(run) == newest_intact(run)[0] == run / "iter_0000003"
    w = torch.zeros(3, 2)
    load(run / "iter_0000003", [Piece("w", (3, 2), ((0, 3), (0, 2)), w)])
    assert (w == 9).all()
    with pytest.raises(AssertionError, match="has no checkpoint of iteration 8"):
        move_tracker_back(run, 8)
