"""Fact: where a framework reduces gradients in buckets, each bucket has the latency of its ring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.forecast.time.data_axis import data_axis_time
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
