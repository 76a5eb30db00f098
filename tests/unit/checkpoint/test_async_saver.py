"""Fact: a checkpoint written in the background holds the state at the time of the call.

A failed write is reported and retried at the next save, while the previous checkpoint stays; no rank exits before the
last one is written.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron3d.checkpoint import async_saver, publish
from megatron3d.checkpoint import store as write
from megatron3d.checkpoint.async_saver import CheckpointSaver
from megatron3d.checkpoint.publish import RetentionPolicy
from megatron3d.checkpoint.store import Piece, latest, load, verify
from megatron3d.comm.objects import GroupObjects
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh
from tests.support.checkpoints import newest_intact

TWO, ONE = Mesh((("x", 2),)), Mesh((("x", 1),))


class Weights:
    """Tensor `w` [4], sharded over two ranks, that training changes in place."""

    def __init__(self, comm):
        self.low, self.values = 2 * comm.mesh.rank, torch.zeros(2)

    def source(self, copy):
        yield Piece("w", (4,), ((self.low, self.low + 2),), copy(self.values))


def read(folder):
    w = torch.full((4,), torch.nan)
    load(folder, [Piece("w", (4,), ((0, 4),), w)])
    return w.tolist()


class Gate:
    """Gate that blocks the writing of files until it is opened; can make one write fail."""

    def __init__(self, monkeypatch):
        self.opened, self.failures, self._original = threading.Event(), [], write.write_boxes
        monkeypatch.setattr("megatron3d.checkpoint.store.write_boxes", self)

    def __call__(self, path, pieces, count):
        assert self.opened.wait(20)
        if self.failures and path.name == "rank_00001.safetensors":
            raise self.failures.pop()
        return self._original(path, pieces, count)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def test_training_continues_during_an_async_save(tmp_path, run_ranks, gate):
    def train(comm):
        weights, saver = Weights(comm), CheckpointSaver(tmp_path, comm, in_background=True)
        weights.values.fill_(1)
        saver.save(1, weights.source, {})
        weights.values.fill_(2)
        assert latest(tmp_path) is None and saver.saved_at is None, "nothing is complete yet"
        comm.training.wait(20)
        gate.opened.set()
        weights.values.fill_(3)
        saver.save(2, weights.source, {})
        weights.values.fill_(4)
        saver.wait()
        return saver.saved_at

    meeting = threading.Barrier(2)

    def run(comm):
        comm.training = meeting
        return train(comm)

    assert run_ranks(TWO, run) == [2, 2]
    assert read(tmp_path / "iter_0000001") == [1] * 4 and read(tmp_path / "iter_0000002") == [3] * 4


def test_a_failure_is_logged_at_once_and_the_next_save_retries(tmp_path, run_ranks, gate):
    gate.opened.set()
    gate.failures.append(OSError(28, "No space left on device"))
    told = []  # type: ignore[var-annotated]

    def train(comm):
        tell = told.append if comm.mesh.rank == 0 else lambda line: None
        weights, saver = (
            Weights(comm),
            CheckpointSaver(tmp_path, comm, RetentionPolicy(1), in_background=True, log=tell),
        )
        found = []
        for iteration in (1, 2):
            weights.values.fill_(iteration)
            saver.save(iteration, weights.source, {})
            saver.wait()
            found.append((saver.saved_at, len(told) > iteration - 1 or comm.mesh.rank == 1))
        return found

    assert run_ranks(TWO, train) == [[(None, True), (2, True)]] * 2
    assert told[0].startswith("not saved, training goes on and the next save is the next try: checkpoint.save=")
    assert "iter_0000001 cannot be written: No space left on device" in told[0]
    assert told[1:] == [f"saved {tmp_path}/iter_0000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]


def test_the_previous_checkpoint_stays_until_the_new_one_is_complete(tmp_path, run_ranks, gate):
    """This also holds where only one checkpoint is retained."""

    def train(comm):
        weights, saver = Weights(comm), CheckpointSaver(tmp_path, comm, RetentionPolicy(1), in_background=True)
        gate.opened.set()
        saver.save(1, weights.source, {})
        saver.wait()
        comm.broadcast_object(gate.opened.clear() if comm.mesh.rank == 0 else None)
        saver.save(2, weights.source, {})
        before = newest_intact(tmp_path)
        comm.meeting.wait(20)
        gate.opened.set()
        saver.wait()
        return before

    meeting = threading.Barrier(2)

    def run(comm):
        comm.meeting = meeting
        return train(comm)

    assert run_ranks(TWO, run) == [(tmp_path / "iter_0000001", [])] * 2
    assert newest_intact(tmp_path) == (tmp_path / "iter_0000002", [])
    assert not (tmp_path / "iter_0000001").exists()


@pytest.mark.parametrize("in_background", [False, True])
def test_the_last_iteration_is_saved_once(tmp_path, run_ranks, gate, in_background):
    """The last iteration is saved once, and an error in that save is raised."""
    gate.opened.set()
    gate.failures.append(OSError(28, "No space left on device"))

    def train(comm):
        weights, saver = Weights(comm), CheckpointSaver(tmp_path, comm, in_background=in_background)
        try:
            saver.save(1, weights.source, {})
            saver.wait()
        except UserError:
            assert not in_background
        saver.finish(1, weights.source, {})
        gate.failures.append(OSError(28, "No space left on device"))
        saver.finish(1, weights.source, {})
        saver.finish(2, weights.source, {})

    errors = run_ranks(TWO, train)
    assert [type(error) for error in errors] == [UserError] * 2
    assert "iter_0000002 cannot be written: No space left" in str(errors[0])
    assert verify(tmp_path / "iter_0000001") == () and latest(tmp_path) == tmp_path / "iter_0000001"


def test_a_crash_in_the_background_is_raised_by_the_next_save(tmp_path, run_ranks, gate):
    gate.opened.set()
    gate.failures.append(KeyError("w"))

    def train(comm):
        weights, saver = Weights(comm), CheckpointSaver(tmp_path, comm, in_background=True)
        saver.save(1, weights.source, {})
        saver.save(2, weights.source, {})

    for error in run_ranks(TWO, train):
        assert isinstance(error, RuntimeError) and str(error) == "rank 1: KeyError('w')"


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_fails_waits_for_a_write_as_long_as_that_goes_on(tmp_path, monkeypatch, goes_on):
    """Bug that this finds: a rank that raises ends its process, and a nearly complete checkpoint with it."""
    opened, original = threading.Event(), write.write_boxes

    def write_slowly(path, pieces, count):
        for _ in range(20 * goes_on):
            count(1)
            time.sleep(0.05)
        assert goes_on or opened.wait(20)
        return original(path, pieces, count)

    monkeypatch.setattr("megatron3d.checkpoint.store.write_boxes", write_slowly)
    saver, values = CheckpointSaver(tmp_path, GroupObjects(ONE), in_background=True), torch.zeros(4)
    saver.save(1, lambda copy: [Piece("w", (4,), ((0, 4),), copy(values))], {})
    begin_s = time.monotonic()
    saver.wait_for_progress(idle_s=0.3)
    assert (latest(tmp_path) is not None) == goes_on
    assert time.monotonic() - begin_s < 10
    opened.set()
    saver.wait()


def test_all_ranks_stay_until_old_checkpoints_are_removed(tmp_path, run_ranks, monkeypatch):
    """Bugs that this finds: the other ranks end, and srun kills rank 0; the watchdog ends a rank that removes files."""
    removed, original = [], publish.prune

    def prune_slowly(*arguments):
        time.sleep(0.5)
        original(*arguments)
        removed.append(1)

    monkeypatch.setattr(async_saver, "prune", prune_slowly)

    def train(comm):
        weights, saver = Weights(comm), CheckpointSaver(tmp_path, comm, RetentionPolicy(1))
        saver.finish(1, weights.source, {})
        written = saver.num_bytes
        saver.finish(2, weights.source, {})
        return len(removed), saver.num_bytes - 2 * written

    assert run_ranks(TWO, train) == [(2, 3), (2, 0)], "two files of ranks and the index"
