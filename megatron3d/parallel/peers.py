"""Which rank keeps a copy of the state of which other one, so that a lost node costs no state.

host of ranks 0, 1, ...     A A B B C C     A A A A     A B A B
their peers                 3 4 5 0 1 2     2 3 0 1     1 0 3 2
"""

from __future__ import annotations

from collections.abc import Sequence

# In-memory checkpoints that a rank keeps of itself and of another one: the last complete one, and the one being made.
NUM_COPIES = 2


def peer_of(rank: int, hosts: Sequence[str]) -> int:
    """Return the rank that keeps a copy of the state of `rank`: half of all ranks further, host by host.

    It is on another host, unless more than half of the ranks are on one; on a single host it is the farthest rank.
    Every rank is the peer of one rank.  A rank alone is its own.

    Args:
        hosts: the host of each rank.
    """
    order = sorted(range(len(hosts)), key=lambda each: (hosts.index(hosts[each]), each))
    return order[(order.index(rank) + len(hosts) // 2) % len(hosts)]


def kept_by(rank: int, hosts: Sequence[str]) -> int:
    """Return the rank of which `rank` keeps a copy."""
    order = sorted(range(len(hosts)), key=lambda each: (hosts.index(hosts[each]), each))
    return order[(order.index(rank) - len(hosts) // 2) % len(hosts)]
