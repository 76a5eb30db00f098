"""Fact: a fault of the machine is retried a few times, named, and never taken for damage or for a user's error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron3d.checkpoint.read import load
from megatron3d.checkpoint.store import Piece, first_intact, save, verify
from megatron3d.comm.objects import on_rank_0
from megatron3d.config.validate.facts import unreadable
from megatron3d.data.token_files.indexed import IndexedDataset
from megatron3d.data.token_files.writer import IndexedWriter
from megatron3d.data.tokenizers.tokenizer import ByteTokenizer
from megatron3d.errors import ExitCode, UserError
from megatron3d.parallel.mesh import Mesh
from megatron3d.runtime.files import retried
from megatron3d.runtime.program import exit_code_of

ONE = Mesh((("x", 1),))


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron3d.runtime.files.WAITS_S", (0.0, 0.0))


def failing(times: int, number: int = errno.ESTALE) -> Callable[[], str]:
    """Return an action that fails some times, and then returns."""
    left = [OSError(number, "Stale file handle")] * times

    def action() -> str:
        if left:
            raise left.pop()
        return "read"

    return action


def test_a_passing_fault_is_reported_and_retried(capsys: pytest.CaptureFixture[str]) -> None:
    assert retried(Path("a"), failing(2)) == "read"
    assert capsys.readouterr().err == "> a: Stale file handle; trying again in 0 s\n" * 2


def test_a_lasting_fault_names_its_file_and_is_no_user_error() -> None:
    with pytest.raises(OSError, match="in 3 attempts") as caught:
        retried(Path("a"), failing(3))
    assert caught.value.filename == "a" and caught.value.errno == errno.ESTALE
    said: list[str] = []

    def work() -> int:
        raise caught.value

    assert exit_code_of(work, said.extend, "") == ExitCode.CRASH and said == ["a: Stale file handle, in 3 attempts"]


def test_other_errors_are_not_retried() -> None:
    with pytest.raises(FileNotFoundError):
        retried(Path("a"), failing(1, errno.ENOENT))


def stale(path: Path, method: str, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let a method of `Path` fail for one file some times, as NFS does after a server has restarted."""
    real: Any = getattr(Path, method)
    left = [None] * times

    def replaced(self: Path, *args: Any, **more: Any) -> Any:
        if self.name == path.name and left:
            left.pop()
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return real(self, *args, **more)

    monkeypatch.setattr(Path, method, replaced)


@pytest.mark.parametrize("file", ["index.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("times", [1, 10**6])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(
    file: str, times: int, tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be loaded in its place, and the newer one be overwritten."""
    w = torch.arange(6.0).reshape(3, 2)
    piece = Piece("model.w", (3, 2), ((0, 3), (0, 2)), w)
    folder = run_ranks(ONE, lambda comm: save(tmp_path / "run", 3, [piece], {}, comm))[0]
    (path,) = folder.glob(file)
    stale(path, "read_bytes" if file == "index.json" else "open", monkeypatch, times)
    if times == 1:
        assert verify(folder) == ()
        return
    for read in (lambda: first_intact([(folder, None)], verify), lambda: load(folder, [piece])):
        with pytest.raises(OSError, match=f"Stale.*{file}"):
            read()


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_corpus_whose_state_cannot_be_read_now_is_not_made_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedWriter(tmp_path / "c", np.dtype("uint16")) as writer:
        writer.add(np.arange(9, dtype=np.uint16), np.array([9]))
        writer.finish(ByteTokenizer(None))
    data = IndexedDataset(tmp_path / "c")
    stale(tmp_path / "c.bin", "stat", monkeypatch, times)
    if times == 1:
        assert data.windows(np.array([0]), 9).tolist() == [[*range(9)]]
        return
    with pytest.raises(OSError, match="Stale"):
        data.windows(np.array([0]), 9)
    with pytest.raises(OSError, match="Stale"):
        unreadable(tmp_path / "c.bin")


def test_a_fault_of_one_rank_is_raised_on_all(run_ranks: Any) -> None:
    def act() -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "f")

    def on_rank(comm: Any) -> str:
        with pytest.raises(OSError, match="Stale") as caught:
            on_rank_0(comm, act)
        assert not isinstance(caught.value, UserError)
        return str(caught.value.filename)

    assert run_ranks(Mesh((("x", 2),)), on_rank) == ["f", "f"]
