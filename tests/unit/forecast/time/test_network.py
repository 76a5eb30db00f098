"""Fact: a ring is as fast as the links by which its members leave each unit, shared with the neighbouring groups.

AxoNN's authors measured these bandwidths on Perlmutter and on Frontier.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.forecast.time.hardware import Cluster, Network, NetworkLevel, load_cluster, members_by_level
from megatron3d.parallel.matmul_plan import Traffic
from megatron3d.parallel.mesh import Mesh

GIB = 1e9
# Ranks inside, ranks of the group, GB/s: axonn-ai/Megatron-AxoNN, examples/comm_model.py at 885d2e7, for Perlmutter.
MEASURED = ((1, 2, 76), (1, 4, 225), (1, 8, 80), (1, 64, 80), (2, 2, 76), (2, 4, 40), (4, 4, 20), (8, 16, 20))


def mesh(inside: int, ranks: int) -> Mesh:
    return Mesh((("outside", 2), ("group", ranks), ("inside", inside)))


@pytest.mark.parametrize(("inside", "ranks", "gb_s"), MEASURED)
def test_bandwidth_on_perlmutter(inside: int, ranks: int, gb_s: float) -> None:
    network, here = Network(load_cluster("perlmutter")), mesh(inside, ranks)
    seconds = [network.seconds(Traffic("all_gather", ("group",), n * GIB), here) for n in (10, 110)]
    assert 100 / (seconds[1] - seconds[0]) == pytest.approx(gb_s, rel=0.02)


def test_an_oversubscribed_fat_tree_is_one_level_more() -> None:
    """One GPU of each pod leaves by its quarter of a link; a ring over all of them crosses with its node's 8 links."""
    sizes = (("node", 8, 360), ("pod", 256, 40), ("spine", 4096, 10))
    levels = tuple(NetworkLevel(name=name, ranks=ranks, gb_s=gb_s, latency_us=3) for name, ranks, gb_s in sizes)
    network = Network(Cluster(name="tree", accelerator="none", levels=levels, source="none"))
    here = Mesh((("between", 2), ("inside", 256)))
    rates = {axes: network.bottleneck(here, axes) for axes in (("inside",), ("between",), ("between", "inside"))}
    found = {axes: (rate / GIB, level.name) for axes, (rate, level) in rates.items()}
    assert list(found.values()) == [(320, "pod"), (10, "spine"), (320, "pod")]


def frontier() -> Cluster:
    """Return Frontier: 8 dies per node, 4 adapters of 25 GB/s; only the bandwidths between nodes."""
    node = NetworkLevel(name="node", ranks=8, gb_s=135, latency_us=3)
    network = NetworkLevel(name="network", ranks=9408, gb_s=5, latency_us=10)
    return Cluster(name="Frontier", accelerator="none", levels=(node, network), source="comm_model.py")


@pytest.mark.parametrize(("inside", "ranks", "gb_s"), [(1, 16, 40), (2, 8, 20), (4, 4, 10), (8, 4, 5)])
def test_bandwidth_between_nodes_of_frontier(inside: int, ranks: int, gb_s: float) -> None:
    seconds = [
        Network(frontier()).seconds(Traffic("all_gather", ("group",), n * GIB), mesh(inside, ranks)) for n in (10, 110)
    ]
    assert 100 / (seconds[1] - seconds[0]) == pytest.approx(gb_s, rel=0.02)


def test_members_of_a_group_by_level() -> None:
    longhorn = load_cluster("longhorn")
    assert members_by_level(longhorn, Mesh((("t", 8),)), ("t",)) == [2, 4, 8]
    assert members_by_level(longhorn, mesh(2, 8), ("group",)) == [1, 2, 8]
    assert members_by_level(longhorn, mesh(4, 8), ("group",)) == [1, 1, 8]


@given(ranks=st.integers(2, 64), inside=st.integers(1, 16), num_bytes=st.floats(0, 1e10))
def test_an_all_reduce_takes_at_most_a_reduce_scatter_and_an_all_gather(
    ranks: int, inside: int, num_bytes: float
) -> None:
    network, here = Network(load_cluster("selene")), mesh(inside, ranks)
    gather, scatter, both = (
        network.seconds(Traffic(name, ("group",), sent), here)
        for name, sent in (("all_gather", num_bytes), ("reduce_scatter", num_bytes), ("all_reduce", 2 * num_bytes))
    )
    assert gather == scatter > 0
    assert both <= gather + scatter + 1e-9


@given(num_bytes=st.floats(0, 1e10), factor=st.integers(2, 8))
def test_a_transfer_between_nodes_is_never_faster(num_bytes: float, factor: int) -> None:
    network = Network(load_cluster("selene"))
    near, far = (network.transfer_s(num_bytes, mesh(inside, 2), ("group",)) for inside in (1, 8 * factor))
    assert near <= far


def test_groups_of_one_rank_send_nothing() -> None:
    assert Network(load_cluster("selene")).seconds(Traffic("all_reduce", ("group",), 0.0), mesh(4, 1)) == 0


def test_pieces_of_one_name_and_other_sizes_are_other_groups() -> None:
    """Layouts of experts split the data axis into pieces that differ in nothing but their sizes."""
    network, call = Network(load_cluster("perlmutter")), Traffic("all_gather", ("data.0",), 1e9)
    pieces = ((("data.0", 2), ("data.1", 8)), (("data.0", 8), ("data.1", 2)))
    meshes = [Mesh((("data", 16),), 0, (("data", sizes),)) for sizes in pieces]
    alone = [Network(load_cluster("perlmutter")).seconds(call, mesh) for mesh in meshes]
    assert [network.seconds(call, mesh) for mesh in meshes] == alone and alone[0] != alone[1]
