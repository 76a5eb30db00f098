"""Fact: the measurement of the network runs on any nodes x ranks, and its bytes are those of the cost model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron3d.forecast.time.hardware import Cluster, Network
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Mesh
from tests.support.tiny_run import launch_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
CLUSTER = """
name: two nodes
accelerator: cpu
cores: 2
levels: [{name: node, ranks: 2, gb_s: 1, latency_us: 1}, {name: network, ranks: 4, gb_s: 1, latency_us: 1}]
source: this test
"""


def test_every_axis_is_measured_and_predicted(tmp_path: Path) -> None:
    """Bug that this finds: ranks that wait for each other's receive, or an axis that is measured as another one."""
    (tmp_path / "two.yaml").write_text(CLUSTER)
    output = tmp_path / "network.jsonl"
    typed = ["benchmarks/network.py", "--cluster", str(tmp_path / "two.yaml"), "--cpu", "--quick"]
    ranks = launch_ranks([*typed, "--output", str(output)], 4)
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    rows = {row["what"]: row for row in map(json.loads, output.read_text().splitlines())}
    for axes in ("inner", "outer", "outer x inner"):
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            row = rows[f"{name} over {axes}"]
            assert row["seconds"] > 0 and row["predicted_s"] > 0
    assert rows["send along inner"]["gb_s"] > 0 and rows["send along outer"]["seconds"] > 0
    first = [name for name in rows if name.startswith("first use of ")]
    assert len(first) >= 3 and "first use of inner 0 to 1" in first
    assert "all_reduce over outer x inner" in said[0][0]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_bytes_are_those_of_a_ring(name: str) -> None:
    """Bug that this finds: an all-reduce that is predicted with the bytes of an all-gather."""
    from network import SENT

    cluster = Cluster.model_validate(
        {"name": "one", "accelerator": "cpu", "source": "this test"}
        | {"levels": [{"name": "node", "ranks": 8, "gb_s": 1, "latency_us": 0}]}
    )
    mesh = Mesh((("outer", 1), ("inner", 8)), 0)
    seconds = Network(cluster).seconds(Traffic(name, ("inner",), SENT[name](8) * 8e9), mesh)
    assert seconds == pytest.approx(14 if name == "all_reduce" else 7)
