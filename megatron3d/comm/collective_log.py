"""Log of the collectives that a rank has started, counted per group, for the watchdog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron3d.parallel.mesh import Axes, Mesh
from megatron3d.parallel.p2p import Link
from megatron3d.runtime.heartbeat import CollectiveStatus, GroupStatus


@dataclass
class _Group:
    """Counters of one group; `label` are its axes, and `first` is the lowest of its ranks."""

    label: str
    first: int
    started: int = 0
    started_op: str = ""
    waited: int = 0
    waited_op: str = ""


class Started(NamedTuple):
    """Collective that was started: its group, name, and number in the group."""

    group: _Group
    op: str
    number: int


class CollectiveLog:
    """Counts collectives and transfers; `status` may be called from another thread.

    A group has the same name on all its ranks: its axes and its first rank, `data@3`.  The two directions of a link are
    two groups, `pipeline 0>1@3` and `pipeline 1>0@3`, in which the n-th send of one end matches the n-th receive of the
    other.

    Attributes:
        last: the collective that was started last.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._groups: dict[Axes | tuple[Link, str], _Group] = {}
        self.last = Started(_Group("", 0), "", 0)
        self._num_started = 0

    def add(self, axes: Axes) -> None:
        """Make the counters of a group, over axes that are live and in the mesh's order."""
        self._groups[axes] = _Group(" x ".join(axes), min(self._mesh.ranks(axes)))

    def add_link(self, link: Link) -> None:
        """Make the counters of a link: sends, receives, and collectives of its two ends."""
        mine = self._mesh.coord(link.axis)
        other = link.high if mine == link.low else link.low
        ends = {"send": f"{mine}>{other}", "receive": f"{other}>{mine}", "all_reduce": f"{link.low}-{link.high}"}
        for op, direction in ends.items():
            self._groups[link, op] = _Group(f"{link.axis} {direction}", min(link.ranks(self._mesh)))

    def start(self, group: Axes | tuple[Link, str], op: str) -> Started:
        """Count a collective over axes, or one of the three kinds of a link."""
        found = self._groups[group]
        found.started += 1
        found.started_op = op
        self._num_started += 1
        self.last = Started(found, op, found.started)
        return self.last

    def wait(self, started: Started) -> None:
        """Note that this rank waits for a collective, and so depends on all ranks of the group."""
        group = started.group
        if started.number > group.waited:
            group.waited, group.waited_op = started.number, started.op

    def status(self) -> CollectiveStatus:
        """Return all counters."""
        groups = {
            f"{group.label}@{group.first}": GroupStatus(group.started, group.started_op, group.waited, group.waited_op)
            for group in list(self._groups.values())
        }
        last = f"{self.last.op} over {self.last.group.label}" if self._num_started else ""
        return CollectiveStatus(self._num_started, last, groups)
