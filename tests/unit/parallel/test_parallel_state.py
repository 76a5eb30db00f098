"""Fact: ranks, sizes and groups of a ParallelState are those that an enumeration of the grid of ranks gives."""

from __future__ import annotations

from itertools import product

import pytest

from megatron3d.config.run_spec import RunSpec
from megatron3d.config.schema import Config
from megatron3d.errors import UserError
from megatron3d.parallel.mesh import DATA, Link
from megatron3d.parallel.parallel_state import REPLICA, SHARD, ParallelSizes, ParallelState

# Pipeline, replicas, shards, sizes of the tensor axes.
SHAPES = [
    (1, 1, 1, (1,)),
    (2, 1, 2, (2,)),
    (1, 2, 3, (1, 2)),
    (4, 2, 2, (1, 3)),
    (3, 1, 1, (2, 2, 2)),
    (2, 2, 1, (2, 1, 3)),
]


def states(pipeline: int, replicas: int, shards: int, tensor: tuple[int, ...]) -> list[ParallelState]:
    axes = tuple(zip("xyz", tensor, strict=False))
    size = 1
    for _, axis in axes:
        size *= axis
    sizes = ParallelSizes(pipeline * replicas * shards * size, size, pipeline, replicas)
    assert sizes.mismatch is None and sizes.data == replicas * shards and sizes.shards == shards
    first = ParallelState(sizes.mesh(axes))
    return [first.on_rank(rank) for rank in range(sizes.world_size)]


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_sizes_and_groups_are_those_of_an_enumeration(shape: tuple[int, int, int, tuple[int, ...]]) -> None:
    pipeline, replicas, shards, tensor = shape
    every = states(*shape)
    grid = list(product(range(pipeline), range(replicas), range(shards), product(*map(range, tensor))))
    assert [state.rank for state in every] == list(range(len(grid)))
    positions = list(product(*map(range, tensor)))
    for state, (p, r, d, t) in zip(every, grid, strict=True):
        assert state.world_size == len(grid)
        assert state.world_size == state.tensor_parallel_size * state.pipeline_parallel_size * state.data_parallel_size
        assert (state.pipeline_parallel_rank, state.pipeline_parallel_size) == (p, pipeline)
        assert (state.mesh.coord(REPLICA), state.mesh.coord(SHARD)) == (r, d)
        assert (state.data_parallel_rank, state.data_parallel_size) == (r * shards + d, replicas * shards)
        assert (state.mesh.index(state.tensor_axes), state.tensor_parallel_size) == (positions.index(t), len(positions))
        groups = {
            state.group(state.tensor_axes): [at[:3] == (p, r, d) for at in grid],
            state.pipeline_parallel_group: [at[1:] == (r, d, t) for at in grid],
            state.group(DATA): [(at[0], at[3]) == (p, t) for at in grid],
            state.group((REPLICA,)): [(at[0], *at[2:]) == (p, d, t) for at in grid],
            state.group((SHARD,)): [(*at[:2], at[3]) == (p, r, t) for at in grid],
        }
        for group, members in groups.items():
            assert list(group) == [rank for rank, is_member in enumerate(members) if is_member]
        assert state.group(DATA).index(state.rank) == state.data_parallel_rank
        assert state.group(state.tensor_axes).index(state.rank) == state.mesh.index(state.tensor_axes)
        assert state.pipeline_parallel_group.index(state.rank) == state.pipeline_parallel_rank


def test_the_picture_of_the_docstring() -> None:
    every = states(2, 1, 2, (2,))
    assert [state.group(state.tensor_axes) for state in every[::2]] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [every[rank].group(DATA) for rank in (0, 1, 4, 5)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [state.pipeline_parallel_group for state in every[:4]] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_world_that_is_not_tp_x_pp_x_dp_is_refused() -> None:
    with pytest.raises(UserError, match="world_size 6: not a multiple of TP 2 x PP 2 = 4; use a multiple of 4"):
        ParallelSizes(6, 2, 2).mesh((("t", 2),))
    with pytest.raises(UserError, match="world_size 2: fewer than TP 4 x PP 1 = 4"):
        ParallelSizes(2, 4, 1).mesh((("t", 4),))
    with pytest.raises(UserError, match="instances=3: does not divide the data parallel size 4"):
        ParallelSizes(8, 2, 1, 3).mesh((("t", 2),))


def test_first_and_last_stage_and_links_of_every_rank() -> None:
    """A V-shaped schedule has both ends of the model on the first pipeline rank; a tied model links its ends."""
    model = {"num_layers": 8, "family": "gpt2", "vocab_size": 64}
    train = {"global_batch_size": 8}
    for schedule, first, last, links in (
        ("1f1b", 0, 3, {(0, 1), (1, 2), (2, 3), (0, 3)}),
        ("zb-v", 0, 0, {(0, 1), (1, 2), (2, 3)}),
    ):
        parallel = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule}
        spec = RunSpec(Config.model_validate({"model": model, "parallel": parallel, "train": train}), 4)
        every = [spec.on_rank(rank).parallel_state for rank in range(4)]
        assert (spec.stage_owners[0], spec.stage_owners[-1]) == (first, last)
        assert {link.ends for link in every[0].links} == links
        for rank, state in enumerate(every):
            assert {*state.my_links} == {Link("pipeline", *pair) for pair in links if rank in pair}
