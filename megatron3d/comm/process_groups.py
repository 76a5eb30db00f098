"""Process groups of one rank, one per set of mesh axes and per direction of each link, and the log of what it started.

NCCL runs the operations of a group one after another.  A link therefore has a group for each direction: activations of
the next microbatch and gradients of an earlier one cross at the same time, and neither waits for the other's sender.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron3d.parallel.mesh import Axes, Link, Mesh, matchings
from megatron3d.runtime.heartbeat import CollectiveStatus, GroupStatus
from megatron3d.runtime.machine import GPU_BACKEND


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


# Most thread blocks that one collective may occupy.  Each takes a multiprocessor from the GEMM that it overlaps with:
# 16 saturate NVLink and the network with large tensors, and leave 116 of an H100's 132 to the GEMM.  A transfer between
# two ranks needs 4 at most, and waits on its multiprocessors until the other rank sends.  Nothing limits collectives
# that overlap with no computation.  NCCL_MAX_CTAS overrides both.
AXES_MAX_CTAS, LINK_MAX_CTAS = 16, 4


def current_device(backend: str) -> torch.device:
    """Return the device of tensors that a backend takes in this process: with NCCL the GPU chosen at the start."""
    accelerator = torch.accelerator.current_accelerator()
    if backend != GPU_BACKEND or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class ProcessGroups:
    """Process groups of a rank, created once, in the order of `axis_sets` and then of `links` along one axis.

    A rank creates only its own groups, so that thousands of ranks start as fast as eight.

    Args:
        exposed: axes whose collectives overlap with no computation, and may take all multiprocessors.

    Attributes:
        of_axes: group of each set of axes; None: the group of all ranks that the backend has made for the rendezvous.
        of_links: group of each link and direction, by the coordinate of the sender.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_sets: Iterable[Axes],
        links: Iterable[Link],
        timeout: timedelta | None,
        exposed: Collection[Axes] = (),
    ) -> None:
        self._mesh, self._timeout = mesh, timeout
        self._exposed = {mesh.in_order(axes) for axes in exposed}
        self.of_axes: dict[Axes, dist.ProcessGroup | None] = {}
        self.of_links: dict[tuple[Link, int], dist.ProcessGroup] = {}
        for axes in dict.fromkeys(mesh.nontrivial(mesh.in_order(axes)) for axes in axis_sets):
            if axes:
                self.of_axes[axes] = self._make_group(axes)
        for matching in matchings(links):
            link = next((each for each in matching if mesh.coord(each.axis) in each.ends), None)
            for direction in (0, 1):  # the lower and then the higher end is the sender
                self._make_link(link, direction)

    def _make_link(self, link: Link | None, direction: int) -> None:
        """Create a group of two ranks, so that a transfer waits only for transfers between the same two.

        torch names a group by the number of groups that its ranks created before it.  A rank without a link in this
        round therefore creates a group of only itself.
        """
        if link is None:
            self._new_group([self._mesh.rank], "None", LINK_MAX_CTAS)
            return
        sender, receiver = link.ends if direction == 0 else link.ends[::-1]
        name = f"{link.axis} {sender} to {receiver}"
        self.of_links[link, sender] = self._new_group(list(link.ranks(self._mesh)), name, LINK_MAX_CTAS)

    def _make_group(self, axes: Axes) -> dist.ProcessGroup | None:
        ranks = self._mesh.ranks(axes)
        if ranks == tuple(range(self._mesh.world_size)) and dist.get_backend() != GPU_BACKEND:
            return None
        return self._new_group(sorted(ranks), "x".join(axes), None if axes in self._exposed else AXES_MAX_CTAS)

    def _new_group(self, ranks: list[int], name: str, max_ctas: int | None) -> dist.ProcessGroup:
        options = _nccl_options(max_ctas, self._timeout) if dist.get_backend() == GPU_BACKEND else None
        group: dist.ProcessGroup = dist.new_group(
            ranks, self._timeout, pg_options=options, use_local_synchronization=True, group_desc=name
        )
        return group


def _nccl_options(max_ctas: int | None, timeout: timedelta | None) -> Any:
    """Return options of a group whose kernels start before those of the compute stream.

    At normal priority a collective waits until the GEMM that it should overlap with has launched its last thread block.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options
