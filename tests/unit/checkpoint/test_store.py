"""Fact: loaded values equal saved values, and any obstacle to a save or load is reported on every rank."""

from __future__ import annotations

import resource

import pytest
import torch

from megatron3d.checkpoint.store import Piece, latest, load, read_index, resolve, save
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import Mesh

TWO = Mesh((("x", 2),))
ONE = Mesh((("x", 1),))


def whole(name, tensor):
    """Return a piece that is a whole tensor."""
    return Piece(name, tuple(tensor.shape), tuple((0, size) for size in tensor.shape), tensor)


def rows_of(rank, tensor):
    """Return half of the rows for each of two ranks."""
    low, high = (0, 1) if rank == 0 else (1, len(tensor))
    return Piece("w", tuple(tensor.shape), ((low, high), (0, tensor.shape[1])), tensor[low:high])


W = torch.arange(6.0).reshape(3, 2)


def problems_of(action, *arguments):
    """Return the problems of the UserError that the action raises."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    return caught.value.problems


def test_the_files_of_a_checkpoint(saved):
    assert sorted(path.name for path in saved.parent.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    names = ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"]
    assert sorted(path.name for path in saved.iterdir()) == names
    assert (saved.parent / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert latest(saved.parent) == resolve(saved.parent) == resolve(saved) == saved
    assert read_index(saved).meta == {"a": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_dtypes_scalars_views_and_empty_pieces(tmp_path, run_ranks, dtype):
    table = torch.arange(6).reshape(2, 3).to(dtype)
    pieces = [whole("t", table.t()), whole("step", torch.tensor(5, dtype=dtype))]
    pieces.append(Piece("t", (3, 2), ((3, 3), (0, 2)), table.new_zeros(0, 2)))
    (folder,) = run_ranks(ONE, lambda comm: save(tmp_path, 1, pieces, {}, comm))
    t, step = torch.zeros(3, 2, dtype=dtype), torch.zeros((), dtype=torch.float64)
    load(folder, [whole("t", t), whole("step", step), Piece("t", (3, 2), ((1, 1), (0, 2)), t[1:1])])
    assert torch.equal(t, table.t())
    assert step.item() == 5


def test_all_differences_are_reported_before_anything_is_loaded(saved):
    w = torch.zeros(3, 2)
    other = [whole("w", w), whole("v", torch.zeros(2)), whole("u", torch.zeros(3)), whole("w", torch.zeros(4, 2))]
    assert problems_of(load, saved, other) == (
        f"checkpoint {saved}: tensor v is not in it; this run needs it with shape [2]",
        f"checkpoint {saved}: tensor u is not in it; this run needs it with shape [3]",
        f"checkpoint {saved}: tensor w has shape [3, 2], this run needs [4, 2]",
    )
    assert not w.any()


def test_all_damaged_files_are_reported(saved):
    first, second = (saved / f"rank_0000{rank}.safetensors" for rank in range(2))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    damaged = problems_of(load, saved, [whole("w", torch.zeros(3, 2))])
    assert len(damaged) == 2
    for problem, file in zip(damaged, (first, second), strict=True):
        assert problem.startswith(f"checkpoint {saved}: {file.name} is missing or damaged: ")
        assert problem.endswith("; load another checkpoint of the run")
    load(saved, [])


def test_only_the_files_that_hold_the_piece_are_read(saved):
    (saved / "rank_00000.safetensors").unlink()
    rows = torch.zeros(2, 2)
    load(saved, [Piece("w", (3, 2), ((1, 3), (0, 2)), rows)])
    assert torch.equal(rows, W[1:])


def test_a_file_with_other_content_is_refused(saved):
    first, second = (saved / f"rank_0000{rank}.safetensors" for rank in range(2))
    second.write_bytes(first.read_bytes())
    (problem,) = problems_of(load, saved, [whole("w", torch.zeros(3, 2))])
    assert "rank_00001.safetensors is missing or damaged: File does not contain tensor w[1:3,0:2]" in problem


def test_a_folder_that_cannot_be_created_is_refused(tmp_path, run_ranks):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "run"
    errors = run_ranks(TWO, lambda comm: save(root, 3, [rows_of(comm.mesh.rank, W)], {}, comm))
    for error in errors:
        assert isinstance(error, UserError)
        (problem,) = error.problems
        assert problem.startswith(f"checkpoint.save={root}: iter_0000003 cannot be written: Not a directory; earlier")


def test_full_disk_fails_on_all_ranks_and_leaves_the_previous_checkpoint(saved, run_ranks):
    big = torch.zeros(3, 10_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        errors = run_ranks(TWO, lambda comm: save(saved.parent, 4, [rows_of(comm.mesh.rank, big)], {}, comm))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [type(error) for error in errors] == [UserError, UserError]
    assert str(errors[0]) == str(errors[1])
    assert f"checkpoint.save={saved.parent}: iter_0000004 cannot be written" in str(errors[0])
    assert "File too large" in str(errors[0])
    assert sorted(path.name for path in saved.parent.iterdir()) == [saved.name, "latest_checkpointed_iteration.txt"]
    assert latest(saved.parent) == saved


def test_pieces_that_do_not_tile_a_tensor_are_refused(tmp_path, run_ranks):
    def save_twice(comm):
        return save(tmp_path, 3, [whole("w", W)], {}, comm)

    for error in run_ranks(TWO, save_twice):
        assert isinstance(error, RuntimeError)
        assert "w: elements [0:3,0:2] are in 2 boxes instead of one" in str(error)
    assert list(tmp_path.iterdir()) == []
