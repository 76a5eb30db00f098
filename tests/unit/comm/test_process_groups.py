"""Fact: both directions of a link have their own group, and NCCL's groups start early, and on few multiprocessors.

With one group for both directions activations would wait for gradients; without options groups would wait for GEMMs.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.comm.process_groups import AXES_MAX_CTAS, LINK_MAX_CTAS, ProcessGroups
from megatron3d.parallel.mesh import Link, Mesh
from tests.support.pool import Pool
from tests.support.shards import pretended_world

LINKS = [Link("pipeline", 0, 1), Link("pipeline", 0, 3), Link("pipeline", 1, 2), Link("pipeline", 2, 3)]


def used_groups(rank: int, link: Link, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the names of the groups over which a rank sends and receives."""
    used: dict[str, str] = {}

    def note(what: str) -> Any:
        return lambda x, other, group: used.update({what: group.group_desc})

    monkeypatch.setattr(dist, "isend", note("send"))
    monkeypatch.setattr(dist, "irecv", note("receive"))
    with pretended_world(rank, 4):
        comm = ProcessComm(Mesh((("pipeline", 4),), rank), [], LINKS)
        monkeypatch.setattr(comm, "_pending", lambda *_: None)
        comm.send(torch.ones(1), link)
        comm.receive(torch.ones(1), link)
    return used


@pytest.mark.parametrize("link", LINKS)
def test_activations_and_gradients_of_a_link_cross_in_different_groups(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = (used_groups(end, link, monkeypatch) for end in link.ends)
    assert low["send"] == high["receive"] == f"pipeline {link.low} to {link.high}"
    assert high["send"] == low["receive"] == f"pipeline {link.high} to {link.low}"


def test_nccl_groups_have_priority_and_few_thread_blocks_unless_they_are_exposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {}

    def options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    def new_group(ranks: list[int], timeout: timedelta, pg_options: Any, group_desc: str, **_: Any) -> list[int]:
        made[group_desc] = pg_options
        return ranks

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    mesh = Mesh((("pipeline", 4), ("t", 2)), 3)
    sets = [("t",), ("pipeline",), ("pipeline", "t")]
    groups: Any = ProcessGroups(mesh, sets, LINKS, timedelta(minutes=5), exposed=[("pipeline",)])
    assert groups.of_axes[("pipeline", "t")] == list(range(8)), "torch's own group has no options"
    assert groups.of_axes[("t",)] == [2, 3]
    assert all(each.is_high_priority_stream and each._timeout == timedelta(minutes=5) for each in made.values())
    assert made["t"].config.max_ctas == made["pipelinext"].config.max_ctas == AXES_MAX_CTAS
    assert not hasattr(made["pipeline"].config, "max_ctas"), "nothing is computed meanwhile"
    assert made["pipeline 0 to 1"].config.max_ctas == made["pipeline 1 to 0"].config.max_ctas == LINK_MAX_CTAS


def warmed(rank: int, world_size: int) -> tuple[list[str], bool, int]:
    mesh = Mesh((("pipeline", 4), ("t", 2)), rank)
    comm = ProcessComm(mesh, [("t",)], LINKS, has_world_group=False)
    seconds = comm.warm_up(LINKS[1:2])
    return [name for name, _ in seconds], all(each > 0 for _, each in seconds), comm.log.status().num_started


def test_a_warm_up_uses_every_group_of_every_rank(pool: Pool) -> None:
    """Ranks that used their links in another order than their neighbours would wait for each other and never end."""
    found = pool.run(warmed, 8)
    for rank, (names, has_times, count) in enumerate(found):
        at = rank // 2
        ends = [link.ends for link in LINKS if at in link.ends]
        directions = {f"pipeline {one} to {other}" for low, high in ends for one, other in ((low, high), (high, low))}
        low, high = LINKS[1].ends
        summed = {f"pipeline {low} + {high}"} if at in (low, high) else set()
        assert set(names) == {"t", *directions, *summed} and len(names) == len(set(names)) == count
        assert has_times
