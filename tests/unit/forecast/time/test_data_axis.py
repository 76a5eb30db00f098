"""Fact: gradients and weights travel along the ranks that hold them, in buckets with a latency of their own, behind the
computation of a rank, which hides each second once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.forecast.time.breakdown import TimeBreakdown, exposed_time
from megatron3d.forecast.time.data_axis import (
    DataAxisTime,
    Interval,
    ScheduleTimes,
    data_axis_time,
    exposed_gather_s,
    exposed_reduction_s,
)
from megatron3d.forecast.time.practices import OURS
from megatron3d.forecast.time.step import load_machine
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Mesh


@pytest.mark.parametrize("zero", [0, 1])
def test_each_bucket_has_its_latency(zero: int) -> None:
    """Bytes take as long in any number of collectives; weights are all-gathered in as many."""
    mesh, counts = Mesh((("pipeline", 1), ("replica", 1), ("data", 64))), {("data",): 10**8}
    whole, bucketed = (
        data_axis_time(counts, mesh, load_machine("eos", "bf16", 64, profile), zero, (1, 1), 4e7)
        for profile in (OURS, replace(OURS, reduces_buckets=True))
    )
    network = load_machine("eos", "bf16", 64).network
    kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
    latency_s = sum(network.seconds(Traffic(kind, ("data",), 0.0), mesh) for kind in kinds)
    more_s = bucketed.sums.total + bucketed.gathers.total - whole.sums.total - whole.gathers.total
    assert more_s == pytest.approx((10 - 1) * latency_s)
    assert bucketed.tail_s == pytest.approx(bucketed.sums.total / 10)


def test_only_weights_that_data_ranks_share_are_gathered() -> None:
    """Experts that are distributed over all data ranks are whole there; those over a piece travel along the other."""
    sizes = (("data.0", 4), ("data.1", 16))
    mesh, machine = Mesh((("pipeline", 1), ("data", 64)), 0, (("data", sizes),)), load_machine("eos", "bf16", 64)
    dense, outer = ("data.0", "data.1"), ("data.0",)

    def gathers(counts: dict[tuple[str, ...], int]) -> TimeBreakdown:
        return data_axis_time(counts, mesh, machine, 1, (1, 1), 4e7).gathers

    alone = gathers({dense: 10**8})
    assert gathers({dense: 10**8, (): 10**9}) == alone
    both = gathers({dense: 10**8, outer: 10**9})
    call = Traffic("all_gather", outer, 2 * 10**9 * 3 / 4)
    assert both.total - alone.total == pytest.approx(machine.network.seconds(call, mesh))


def test_a_second_of_computation_hides_one_second_of_the_stages_of_a_rank() -> None:
    """Three stages have 4 s each: 10 s of computation hide all but 2 s, which begin with the last backwards."""
    times = exposed_time(("data",), 4.0)
    each = dict.fromkeys(range(3), DataAxisTime(times, times, 0.0))
    ends = {stage: Interval(20.0, 20.0) for stage in each}
    line = ScheduleTimes(20.0, 20.0, dict.fromkeys(each, Interval(0.0, 0.0)), ends)
    assert exposed_reduction_s(each, line, 10.0) == pytest.approx(2.0)
    assert exposed_gather_s(each, line, 10.0) == pytest.approx(2.0)
    assert exposed_reduction_s(each, line, 12.5) == exposed_gather_s(each, line, 12.5) == 0.0
