"""Fact: a group of ranks has one name on all of them and no other group has it, and a wait names the collective."""

from __future__ import annotations

import pytest

from megatron3d.comm.process_groups import CollectiveLog
from megatron3d.parallel.mesh import Axes, Link, Mesh
from megatron3d.runtime.heartbeat import CollectiveStatus, GroupStatus

AXES = (("pipeline", 2), ("data", 2), ("x", 2))


@pytest.mark.parametrize("axes", [("data",), ("x",), ("data", "x"), ("pipeline", "data", "x")])
def test_ranks_of_a_group_agree_on_its_name(axes: Axes) -> None:
    """Bug that this finds: groups over the same axes share a name, so that ranks that never meet are compared."""
    members: dict[str, set[int]] = {}
    for rank in range(8):
        log = CollectiveLog(Mesh(AXES, rank))
        log.add(axes)
        (name,) = log.status().groups
        members.setdefault(name, set()).add(rank)
    assert set(map(frozenset, members.values())) == {frozenset(Mesh(AXES, rank).ranks(axes)) for rank in range(8)}


def test_sends_of_one_end_are_receives_of_the_other() -> None:
    link = Link("pipeline", 0, 1)
    logs = [CollectiveLog(Mesh(AXES, rank)) for rank in (3, 7)]
    for log, op in zip(logs, ("send", "receive"), strict=True):
        log.add_link(link)
        log.start((link, op), op)
    low, high = (log.status().groups for log in logs)
    assert low["pipeline 0>1@3"] == GroupStatus(1, "send") and high["pipeline 0>1@3"] == GroupStatus(1, "receive")
    assert low.keys() == high.keys() and low["pipeline 1>0@3"] == high["pipeline 1>0@3"] == GroupStatus(0, "")


def test_waits_are_counted_by_the_collective_that_is_waited_for() -> None:
    log = CollectiveLog(Mesh(AXES, 0))
    assert log.status() == CollectiveStatus()
    log.add(("data",))
    first, second = log.start(("data",), "all_gather"), log.start(("data",), "reduce_scatter")
    log.wait(second)
    log.wait(first)
    assert log.status() == CollectiveStatus(
        2, "reduce_scatter over data", {"data@0": GroupStatus(2, "reduce_scatter", 2, "reduce_scatter")}
    )
