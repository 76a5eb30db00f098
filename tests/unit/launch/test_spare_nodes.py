"""Fact: a job with spare nodes trains on good ones: not on an unfit node, nor on one that it has lost a rank on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron3d.errors import UserError
from megatron3d.launch.spare_nodes import choose_nodes
from megatron3d.runtime.culprits import add_culprits, add_unfit
from megatron3d.runtime.launcher_env import SlurmJob

NODES = ["a", "b", "c", "d", "e"]


def job(requeue: int = 0, number: int = 7, node: str = "a") -> SlurmJob:
    return SlurmJob(number, requeue, 0, node, "")


def test_the_first_nodes_train_and_the_last_are_spare(tmp_path: Path) -> None:
    assert choose_nodes(tmp_path, job(), NODES, 2, elastic=False).nodes == ("a", "b", "c")


def test_the_node_of_a_rank_at_fault_is_left_out_for_the_rest_of_the_job(tmp_path: Path) -> None:
    """Ranks are counted over the nodes that trained: after b is gone, rank 3 of 6 is on c."""
    assert choose_nodes(tmp_path, job(0), NODES, 2, elastic=False).nodes == ("a", "b", "c")
    add_culprits(tmp_path, [2], world_size=6)
    second = choose_nodes(tmp_path, job(1), NODES, 2, elastic=False)
    assert second.nodes == ("a", "c", "d")
    assert second.left_out == {"b": "rank 2 of launch 1 was at fault"}
    add_culprits(tmp_path, [3], world_size=6)
    third = choose_nodes(tmp_path, job(2), NODES, 2, elastic=False)
    assert third.nodes == ("a", "d", "e")
    assert third.left_out == {"b": "rank 2 of launch 1 was at fault", "c": "rank 3 of launch 2 was at fault"}
    other = choose_nodes(tmp_path, job(0, number=8), NODES, 2, elastic=False)
    assert other.nodes == ("a", "b", "c"), "another job has other nodes, or repaired ones"


def test_a_requeue_on_other_nodes_knows_only_the_names(tmp_path: Path) -> None:
    choose_nodes(tmp_path, job(0), NODES[:3], 1, elastic=False)
    add_culprits(tmp_path, [0, 1], world_size=4)
    assert choose_nodes(tmp_path, job(1), ["x", "y", "z"], 1, elastic=False).nodes == ("x", "y")


def test_an_unfit_node_is_left_out_of_its_launch(tmp_path: Path) -> None:
    add_unfit(tmp_path, job(0, node="b"), "GPU 1 is lost")
    chosen = choose_nodes(tmp_path, job(0), NODES, 1, elastic=False)
    assert chosen.nodes == ("a", "c", "d", "e") and chosen.left_out == {"b": "GPU 1 is lost"}
    assert choose_nodes(tmp_path, job(0, number=8), NODES, 1, elastic=False).nodes == ("a", "b", "c", "d")


def test_without_enough_good_nodes(tmp_path: Path) -> None:
    """An elastic run takes fewer; another one takes a blamed node again, but none that is unfit now."""
    choose_nodes(tmp_path, job(0), NODES[:3], 0, elastic=False)
    add_culprits(tmp_path, [1], world_size=3)
    assert choose_nodes(tmp_path, job(1), NODES[:3], 0, elastic=True).nodes == ("a", "c")
    assert choose_nodes(tmp_path, job(2), NODES[:3], 0, elastic=False).nodes == ("a", "b", "c")
    for number, left in enumerate("ba", start=1):
        add_unfit(tmp_path, job(3, node=left), f"{left} is lost")
        with pytest.raises(
            UserError, match=rf"3 of 3 nodes are needed, and only {3 - number} are fit; .*{left} is lost"
        ):
            choose_nodes(tmp_path, job(3), NODES[:3], 0, elastic=False)
    assert choose_nodes(tmp_path, job(3), NODES[:3], 0, elastic=True).nodes == ("c",)
    add_unfit(tmp_path, job(3, node="c"), "c is lost")
    with pytest.raises(UserError, match=r"only 0 are fit; .*c is lost"):
        choose_nodes(tmp_path, job(3), NODES[:3], 0, elastic=True)
