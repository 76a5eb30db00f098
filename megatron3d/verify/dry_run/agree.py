"""Compare the collectives that the members of each group issue; on a cluster, a difference is a deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from megatron3d.parallel.parallel_state import ParallelState
from megatron3d.verify.dry_run.run import RankDryRun


def disagreements(runs: Sequence[RankDryRun], state: ParallelState) -> list[str]:
    """Return the first difference of each pair of group members, or of the two ends of a link."""
    found = list[str]()
    lists: dict[tuple[int, ...], dict[int, list[tuple[str, tuple[int, ...], str]]]] = {}
    for run in runs:
        here = state.mesh.at(run.rank)
        for what, where, shape, dtype in run.entries:
            group = tuple(sorted(here.ranks(where))) if isinstance(where, tuple) else where.ranks(here)
            if not isinstance(where, tuple) and run.rank == group[1]:
                what = {"send": "receive", "receive": "send"}.get(what, what)
            lists.setdefault(group, {}).setdefault(run.rank, []).append((what, shape, dtype))
    present = {run.rank for run in runs}
    for group, by_rank in lists.items():
        ranks = [rank for rank in group if rank in present]
        first = by_rank.get(ranks[0], [])
        for other in ranks[1:]:
            found += _difference(ranks[0], first, other, by_rank.get(other, []))
    return found


def _difference(rank: int, mine: Sequence[object], other: int, theirs: Sequence[object]) -> list[str]:
    for number, (one, two) in enumerate(zip(mine, theirs, strict=False), 1):
        if one != two:
            return [
                f"ranks {rank} and {other} would hang: call {number} between them is {one} on one, {two} on the other"
            ]
    if len(mine) != len(theirs):
        counts = f"rank {rank} makes {len(mine)} calls, rank {other} {len(theirs)}"
        return [f"ranks {rank} and {other} would hang: {counts} to the same group"]
    return []
