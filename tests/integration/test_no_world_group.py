"""Fact: a run whose backend connects groups at their first use, as NCCL does, never communicates in one of all ranks.

Such a run trains, logs, searches for slow ranks, evaluates and saves in the background here over gloo, with the same
numbers as otherwise.  Bug that this finds: a collective, barrier or object that still goes through torch's own group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron3d.comm.objects import store_objects
from megatron3d.comm.process_comm import ProcessComm
from megatron3d.errors import ExitCode
from megatron3d.metrics.journal import read_journal
from megatron3d.parallel.mesh import Axes, Link, Mesh
from tests.support.pool import Pool
from tests.support.tiny_run import evaluations, in_run, run_as_rank, steps, stored, write_config

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
OBJECTS = ("gather_object", "broadcast_object_list", "barrier")
ASKED = [
    *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", "train.precision=fp64"),
    *("parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=1", "train.train_iters=4"),
    *("train.eval_interval=2", "train.eval_iters=1", "checkpoint.save_interval=2", "checkpoint.async_save=true"),
    *("logging.straggler_factor=1000", "logging.log_moments_interval=2", "logging.trace_iterations=[3]"),
    "train.check_weight_hash_across_dp_replicas_interval=2",
]


class LazyComm(ProcessComm):
    """Communicator over gloo as it is over NCCL; all its groups are used at the start."""

    def __init__(
        self,
        mesh: Mesh,
        axis_sets: Iterable[Axes],
        links: Iterable[Link] = (),
        timeout: timedelta | None = None,
        exposed: Collection[Axes] = (),
    ) -> None:
        super().__init__(mesh, axis_sets, links, timeout, has_world_group=False, exposed=exposed)
        self._objects = store_objects(mesh, timeout)
        assert mesh.nontrivial(mesh.names) not in self._groups
        self.warm_up()


def run_without_world_group(rank: int, world_size: int, config: Path, asked: list[str]) -> list[int]:
    def only_in_groups(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            assert group is not None and dist.get_world_size(group) < world_size, f"{name} in the group of all ranks"
            return original(*args, group=group, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*COLLECTIVES, *OBJECTS):
            patch.setattr(dist, name, only_in_groups(name))
        patch.setattr("megatron3d.train.state.ProcessComm", LazyComm)
        return run_as_rank(rank, world_size, config, [asked])


def test_a_run_without_a_group_of_all_ranks_has_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    folders = [tmp_path / name for name in ("plain", "lazy")]
    plain, lazy = ([*in_run(str(folder)), *ASKED] for folder in folders)
    assert pool.run(run_as_rank, 8, config, [plain]) == [[ExitCode.DONE]] * 8
    assert pool.run(run_without_world_group, 8, config, lazy) == [[ExitCode.DONE]] * 8
    for numbers in (steps, evaluations):
        expected, found = (numbers(folder) for folder in folders)
        assert len(found) == len(expected) >= 2
        assert all(one == pytest.approx(other, rel=1e-12) for one, other in zip(found, expected, strict=True))
    expected_tensors, tensors = (stored(folder, 4) for folder in folders)
    assert expected_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (tensor - expected_tensors[name]).abs().max() <= 1e-10, name
    timers = [row["timers"].keys() for row in read_journal(folders[1] / "metrics.jsonl") if "timers" in row]
    assert timers and not any("along pipeline·data·t" in names for names in timers)
