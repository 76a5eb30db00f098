"""Fact: a rank that is slower than its peers for long enough is named, once, and no other."""

from __future__ import annotations

import pytest

from megatron3d.parallel.mesh import Mesh
from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.train.monitor.stragglers import PeerGroups, Straggler, StragglerDetector, fewer_layers


def state(pipeline: int, data: int) -> ParallelState:
    return ParallelState(Mesh((("pipeline", pipeline), ("replica", 1), ("data", data))))


def test_a_rank_is_compared_with_ranks_of_its_pipeline_rank() -> None:
    """Peers share a pipeline coordinate; those of the second pipeline rank have four times the work."""
    slow = StragglerDetector(PeerGroups.of(state(2, 3), [10, 40]), factor=1.5, num_steps=3)
    as_ever, late = [10.0, 11, 12, 40, 41, 42], [10.0, 11, 12, 40, 80, 42]
    seen = [slow.check(times) for times in (late, late, as_ever, late, late, late, late, as_ever, late, late, late)]
    named = [Straggler(4, 80 / 42)]
    assert [bool(each) for each in seen] == [False] * 5 + [True] + [False] * 4 + [True]
    assert seen[5] == seen[10] == named


def test_the_slower_of_two_ranks_is_named() -> None:
    slow = StragglerDetector(PeerGroups.of(state(1, 2), [10]), factor=1.5, num_steps=1)
    assert slow.check([10.0, 14.9]) == [] and slow.check([30.0, 10.0]) == [Straggler(0, 3.0)]


def test_single_pipeline_ranks_are_compared_by_flops() -> None:
    """The third pipeline rank has no FLOPs, and is never named."""
    slow = StragglerDetector(PeerGroups.of(state(4, 1), [100, 200, 0, 100]), factor=1.5, num_steps=1)
    assert slow.check([10.0, 20.0, 5.0, 10.0]) == []
    assert slow.check([10.0, 40.0, 50.0, 10.0]) == [Straggler(1, 2.0)]


def test_uniformly_slow_ranks_are_not_named() -> None:
    slow = StragglerDetector(PeerGroups.of(state(1, 4), [10]), factor=1.5, num_steps=1)
    assert [slow.check([factor * 10.0] * 4) for factor in (1, 5, 50)] == [[]] * 3


def test_the_excess_is_by_flops() -> None:
    assert PeerGroups.of(state(3, 1), [100, 200, 100]).excess(1, [10.0, 50.0, 10.0]) == pytest.approx(30)


@pytest.mark.parametrize(
    ("counts", "place", "ratio", "found"),
    [
        ([8, 8], 0, 2.0, (5, 11 / 16)),  # 5 slow layers take 10, the 11 others 11
        ([4, 4, 4, 4], 3, 3.0, (1, 5 / 12)),
        ([4, 4], 1, 10.0, (0, 8 / 40)),
        ([4, 4], 1, 1.1, None),  # 3 slow layers take 3.3, but the 5 others 5
        ([8], 0, 2.0, None),
    ],
)
def test_fewer_layers_on_a_slow_pipeline_rank(
    counts: list[int], place: int, ratio: float, found: tuple[int, float] | None
) -> None:
    assert fewer_layers(counts, place, ratio) == found
