"""Fact: if one rank fails, all ranks raise the same error, and none waits forever."""

from __future__ import annotations

import pytest

from megatron3d.comm.objects import run_on_all_ranks
from megatron3d.errors import RunFailed, UserError
from megatron3d.parallel.mesh import Mesh

FOUR = Mesh((("x", 4),))


def test_results_in_rank_order(run_ranks):
    assert run_ranks(FOUR, lambda comm: run_on_all_ranks(comm, lambda: comm.mesh.rank)) == [
        [0, 1, 2, 3],
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("failing", [0, 3])
def test_problems_are_reported_once_on_every_rank(run_ranks, failing):
    def action(rank):
        if rank >= failing:
            raise UserError("disk full", f"rank {failing} is sad")

    errors = run_ranks(FOUR, lambda comm: run_on_all_ranks(comm, lambda: action(comm.mesh.rank)))
    assert [type(error) for error in errors] == [UserError] * 4
    assert {error.problems for error in errors} == {("disk full", f"rank {failing} is sad")}


def test_a_file_that_fails_on_one_rank_is_a_problem_on_all(run_ranks, tmp_path):
    def action(rank):
        if rank == 2:
            tmp_path.write_text("a folder")

    errors = run_ranks(FOUR, lambda comm: run_on_all_ranks(comm, lambda: action(comm.mesh.rank)))
    assert [type(error) for error in errors] == [UserError] * 4
    assert {error.problems for error in errors} == {(f"{tmp_path}: Is a directory",)}


def test_a_crash_keeps_its_cause(run_ranks):
    def action(rank):
        if rank == 2:
            raise KeyError("w")

    errors = run_ranks(FOUR, lambda comm: run_on_all_ranks(comm, lambda: action(comm.mesh.rank)))
    assert {str(error) for error in errors} == {"rank 2: KeyError('w')"}
    assert [type(error) for error in errors] == [RunFailed, RunFailed, RuntimeError, RunFailed], "one has a traceback"
    assert [type(error.__cause__) for error in errors] == [type(None), type(None), KeyError, type(None)]
