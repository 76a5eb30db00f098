"""Fact: every rank is the peer of one other rank, on another host unless one host has more than half of the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.parallel.peers import kept_by, peer_of


@pytest.mark.parametrize(
    ("hosts", "peers"),
    [
        ("AABBCC", [3, 4, 5, 0, 1, 2]),
        ("AAAA", [2, 3, 0, 1]),
        ("ABAB", [1, 0, 3, 2]),
        ("AAAB", [2, 3, 0, 1]),
        ("ABC", [1, 2, 0]),
        ("A", [0]),
    ],
)
def test_peers_of_a_table(hosts: str, peers: list[int]) -> None:
    assert [peer_of(rank, hosts) for rank in range(len(hosts))] == peers


@given(st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=24))
def test_a_peer_is_on_another_host(hosts: list[str]) -> None:
    ranks = range(len(hosts))
    peers = [peer_of(rank, hosts) for rank in ranks]
    assert sorted(peers) == [*ranks] and [kept_by(peer, hosts) for peer in peers] == [*ranks]
    if len(hosts) > 1:
        assert all(rank != peer for rank, peer in enumerate(peers))
    if max(map(hosts.count, hosts)) <= len(hosts) // 2:
        assert all(hosts[rank] != hosts[peer] for rank, peer in enumerate(peers))
