"""Fact: numbers of ranks and batches near those asked for are tried, and a plan beyond a cluster says so."""

from __future__ import annotations

from dataclasses import replace

from megatron3d.config.schema import Config
from megatron3d.forecast.search.problem import PlanningProblem
from megatron3d.forecast.search.report import beyond, nearby_problems, nearby_table, search_nearby
from megatron3d.forecast.search.search import search

MODEL = {"num_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 8192}
TRAIN = {"global_batch_size": 20, "precision": "bf16"}
PROBLEM = PlanningProblem(Config.model_validate({"model": MODEL, "train": TRAIN}), 8192, "perlmutter", 20)


def test_ranks_that_a_cluster_does_not_have_are_told() -> None:
    cluster = PROBLEM.machine.network.cluster
    assert list(beyond(cluster, 6144)) == []
    assert "Perlmutter has 6,144 ranks: predicted as if its level network (20 GB/s) went on to 6,148" in next(
        beyond(cluster, 6148)
    )


def test_nearby_numbers_with_many_divisors_are_tried() -> None:
    """Whole nodes, and batches that many data-parallel sizes divide; a layout there is the best of its tensor size."""
    numbers = [(each.num_ranks, each.config.train.global_batch_size) for each in nearby_problems(PROBLEM)]
    assert numbers == [(16, 20), (24, 20), (20, 16), (20, 18), (20, 21), (20, 24)]
    assert [each.num_ranks for each in nearby_problems(replace(PROBLEM, num_ranks=1000))][:4] == [840, 960, 1008, 1080]
    assert [each.num_ranks for each in nearby_problems(replace(PROBLEM, num_ranks=3))][:1] == [3]
    # No part of a second node.
    assert {each.num_ranks for each in nearby_problems(replace(PROBLEM, num_ranks=4))} == {3, 4}
    (best,) = search(PROBLEM, 1).plans
    found = search_nearby(PROBLEM, best)
    assert found and {each.plan.layout.tensor.size for each in found} == {best.layout.tensor.size}
    slow = replace(best, step=replace(best.step, step_s=2 * best.step.step_s))
    table = nearby_table(PROBLEM, slow, found)
    speeds = [float(line.split(" %")[0].split()[-1]) for line in table[2:]]
    assert len(speeds) == len(found) and speeds == sorted(speeds, reverse=True) and min(speeds) > 1
    assert (
        "none is more than 1 % faster"
        in nearby_table(PROBLEM, replace(best, step=replace(best.step, step_s=1e-9)), found)[0]
    )
