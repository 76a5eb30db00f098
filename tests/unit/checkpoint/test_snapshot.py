"""Fact: a snapshot holds the state at the time of its start, in one buffer per dtype of exactly the needed size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron3d.checkpoint.async_saver import CheckpointSaver, Snapshot
from megatron3d.checkpoint.store import Piece, load
from megatron3d.comm.objects import GroupObjects
from megatron3d.errors import ExitCode, UserError
from megatron3d.parallel.mesh import Mesh
from tests.support.late_stream import LateStream
from tests.support.tiny_run import in_run, run, stored, write_config

CPU = torch.device("cpu")


def state():
    return {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0), "n": torch.arange(3, dtype=torch.bfloat16)}


def source_of(tensors):
    def source(copy):
        for name, x in tensors.items():
            yield Piece(name, tuple(x.shape), tuple((0, size) for size in x.shape), copy(x))

    return source


def test_memory_is_made_once_without_rounding():
    """Catches buffers rounded up to powers of two, and new memory for each save."""
    tensors, snapshot = state(), Snapshot(CPU)
    snapshot.allocate(source_of(tensors))
    places = set()
    for _ in range(3):
        pieces = snapshot.take(source_of(tensors))
        snapshot.wait()
        assert all(torch.equal(piece.tensor, tensors[piece.name]) for piece in pieces)
        places.add(tuple(piece.tensor.data_ptr() for piece in pieces))
        assert snapshot.num_bytes == (12 + 5) * 4 + 3 * 2
        assert pieces[1].tensor.data_ptr() == pieces[0].tensor.data_ptr() + 12 * 4, "one buffer per dtype"
        for x in tensors.values():
            x.add_(1)
    assert len(places) == 1


def test_a_change_after_the_wait_does_not_reach_the_copy():
    """Catches an update that does not wait for the copy: the stream copies as late as it may."""
    tensors, snapshot = state(), Snapshot(CPU, LateStream())
    before = {name: x.clone() for name, x in tensors.items()}
    pieces = snapshot.take(source_of(tensors))
    snapshot.hold_update()
    for x in tensors.values():
        x.zero_()
    snapshot.wait()
    assert all(torch.equal(piece.tensor, before[piece.name]) for piece in pieces)
    assert not any((piece.tensor == 0).all() for piece in pieces)


@pytest.mark.parametrize("holds", [True, False])
def test_a_save_holds_the_state_at_its_start(tmp_path, holds):
    """Without `hold_update` the late stream shows the mistake that this test is for."""
    w = torch.ones(4)
    comm = GroupObjects(Mesh((("data", 1),)))
    saver = CheckpointSaver(tmp_path, comm, in_background=True, snapshot=Snapshot(CPU, LateStream(0.2)))
    saver.prepare(source_of({"w": w}))
    saver.save(1, source_of({"w": w}), {})
    if holds:
        saver.hold_update()
    w.fill_(2)
    saver.wait()
    found = torch.zeros(4)
    load(tmp_path / "iter_0000001", [Piece("w", (4,), ((0, 4),), found)])
    assert found.tolist() == ([1.0] * 4 if holds else [2.0] * 4)


def test_memory_that_cannot_be_page_locked_is_a_user_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("1.0 GiB of host memory cannot be page-locked (CUDA error 2)")

    monkeypatch.setattr("megatron3d.checkpoint.async_saver.host_memory", refuse)
    snapshot = Snapshot(CPU)
    snapshot.allocate(source_of(state()))
    with pytest.raises(UserError, match=r"checkpoint\.async_save=true: 1\.0 GiB of host memory"):
        snapshot.take(source_of(state()))


@pytest.mark.slow
def test_a_run_updates_only_after_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a training loop or a step that does not hold the update back."""
    config = write_config(tmp_path)
    asked = ["checkpoint.save_interval=2", "train.train_iters=3", "train.precision=fp64"]
    assert run(config, *in_run(f"{tmp_path}/now"), *asked).code == ExitCode.DONE
    monkeypatch.setattr("megatron3d.checkpoint.async_saver.side_stream", lambda device: LateStream(5.0))
    assert run(config, *in_run(f"{tmp_path}/late"), *asked, "checkpoint.async_save=true").code == ExitCode.DONE
    now, late = (stored(tmp_path / name, 2) for name in ("now", "late"))
    assert now.keys() == late.keys() and all(torch.equal(now[name], late[name]) for name in now)
