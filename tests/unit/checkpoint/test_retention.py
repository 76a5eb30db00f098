"""Fact: the newest k checkpoints and every n-th iteration are retained, and a short-lived one until one is newer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.publish import RetentionPolicy, finished_checkpoints, prune, remove_non_persistent
from megatron3d.checkpoint.store import Piece, latest
from megatron3d.config.schema import CheckpointConfig
from megatron3d.parallel.mesh import Mesh
from tests.support.checkpoints import newest_intact

ONE = Mesh((("x", 1),))
TRACKER = "latest_checkpointed_iteration.txt"


def source(copy):
    return [Piece("w", (2,), ((0, 2),), copy(torch.ones(2)))]


def run_saves(run_ranks, root, keep, *saves):
    """Save iterations in turn; negative ones are short-lived."""

    def save(comm):
        saver = CheckpointSaver(root, comm, keep)
        for iteration in saves:
            saver.save(abs(iteration), source, {}, permanent=iteration > 0)

    assert run_ranks(ONE, save) == [None]


@pytest.mark.parametrize(
    ("checkpoint", "left"),
    [
        ({}, {10, 20, 30, 40, 50, 60}),
        ({"keep_latest_k": 2}, {50, 60}),
        ({"keep_latest_k": 1}, {60}),
        ({"keep_latest_k": 9}, {10, 20, 30, 40, 50, 60}),
        ({"save_retain_interval": 25}, {50, 60}),
        ({"save_retain_interval": 20}, {20, 40, 60}),
        ({"save_retain_interval": 30, "keep_latest_k": 3}, {30, 40, 50, 60}),
    ],
)
def test_retained_checkpoints(tmp_path, run_ranks, checkpoint, left):
    run_saves(run_ranks, tmp_path, RetentionPolicy.of(CheckpointConfig(save="here", **checkpoint)), *range(10, 70, 10))
    assert finished_checkpoints(tmp_path).keys() == left
    assert newest_intact(tmp_path) == (tmp_path / "iter_0000060", [])
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, *(f"iter_{i:07d}" for i in left)}


@given(
    st.sets(st.integers(1, 40), min_size=1, max_size=12),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 40),
)
def test_pruning_removes_only_what_the_policy_allows(tmp_path_factory, iterations, k, n, best):
    """The tracker's checkpoint and the best one are retained, and later ones are left alone."""
    root = tmp_path_factory.mktemp("run")
    last = sorted(iterations)[len(iterations) // 2]
    for iteration in iterations:
        (root / f"iter_{iteration:07d}").mkdir()
    (root / TRACKER).write_text(str(last))
    prune(root, RetentionPolicy(k, n), best=best)
    past = sorted(i for i in iterations if i <= last)
    stays = set(past if k is None else past[-k:]) | {i for i in past if (n and i % n == 0) or i == best}
    assert finished_checkpoints(root).keys() == stays | {i for i in iterations if i > last}
    assert last in stays and not list(root.glob(".*"))


def test_a_linked_checkpoint_loses_its_link_and_not_its_files(tmp_path):
    """Bug that this finds: what somebody has moved to another disk, and linked, is removed there."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "index.json").touch()
    root.mkdir()
    (root / "iter_0000001").symlink_to(elsewhere)
    (root / "iter_0000002").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    prune(root, RetentionPolicy(1))
    assert (elsewhere / "index.json").exists() and list(finished_checkpoints(root)) == [2]
    assert not list(root.glob(".*"))


def test_the_newest_non_persistent_checkpoint_stays(tmp_path, run_ranks):
    run_saves(run_ranks, tmp_path, RetentionPolicy(), 10, -12, -14)
    short = tmp_path / "non_persistent"
    assert finished_checkpoints(short).keys() == {14} and finished_checkpoints(tmp_path).keys() == {10}
    assert latest(tmp_path) == short / "iter_0000014"
    run_saves(run_ranks, tmp_path, RetentionPolicy(), 20)
    assert not short.exists() and latest(tmp_path) == tmp_path / "iter_0000020"
    run_saves(run_ranks, tmp_path, RetentionPolicy(), -23)
    remove_non_persistent(tmp_path, 22)
    assert latest(tmp_path) == short / "iter_0000023", "it is newer than iteration 22"


def test_an_interrupted_removal_is_finished_by_the_next_save(tmp_path, run_ranks, monkeypatch):
    real = shutil.rmtree

    def fail(path, *rest, **options):
        if Path(path).name.endswith(".gone"):
            raise OSError("busy")
        real(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        run_saves(run_ranks, tmp_path, RetentionPolicy(1), 1, 2)
    assert (tmp_path / ".iter_0000001.gone").exists() and finished_checkpoints(tmp_path).keys() == {2}
    run_saves(run_ranks, tmp_path, RetentionPolicy(1), 3)
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000003"}
