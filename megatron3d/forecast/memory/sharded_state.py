"""Buffers of gradients and gathered parameters that come and go within a step, as `zero/buffers.py` has them.

    gradients    whole until the last one of a buffer has arrived | in reduction | this rank's shard
    parameters   gathered before an FSDP unit's forward and backward, with the next unit's | freed behind it

Whole gradients live for the whole step up to ZeRO 1, and so do parameters up to ZeRO 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

# Units that the last one gathers for backward.
PREFETCHED_BY_HEAD = 2


class GradientBuffer(NamedTuple):
    """Flat buffer of gradients.

    Attributes:
        whole, shard: bytes of all of it, and of this rank's shard.
        sent, received, total: bytes of what its reduction sends and receives beside it, and of the sum of that; 0 where
            it is reduced in place.
        num_grads: gradients of a microbatch.
        has_rest: a second collective follows the first one.
    """

    whole: int
    shard: int
    sent: int
    received: int
    total: int
    num_grads: int
    has_rest: bool


class FsdpUnitSize(NamedTuple):
    """FSDP unit: bytes of its parameters, its stage, and whether backward needs them."""

    path: str
    num_bytes: int
    stage: int
    in_backward: bool


@dataclass
class ShardedState:
    """State of the buffers of a rank between two operations.

    Attributes:
        missing: gradients that each buffer lacks until its next reduction.
        has_whole: whether the whole buffer is in memory; `has_shard`: whether this rank's shard is.
        reductions: buffers in reduction, and whether the first collective is over.
        gathered: units whose parameters are in memory; `in_backward`: those whose backward runs.
        live: bytes of all of it.
    """

    buffers: Sequence[GradientBuffer]
    units: Sequence[FsdpUnitSize]
    num_microbatches: int
    shards_grads: bool
    is_sequential: bool

    def __post_init__(self) -> None:
        count = len(self.buffers)
        self.missing = [self._wanted(each) for each in self.buffers]
        self.has_whole, self.has_shard = [not self.shards_grads] * count, [not self.shards_grads] * count
        self.reductions: list[tuple[int, bool]] = []
        self.gathered, self.in_backward = set[str](), set[str]()
        self.live = 0

    def copied(self, missing: Sequence[int]) -> ShardedState:
        """Return a copy whose buffers lack as many gradients."""
        found = copy(self)
        found.missing = list(missing)
        found.has_whole, found.has_shard, found.reductions = [*self.has_whole], [*self.has_shard], [*self.reductions]
        found.gathered, found.in_backward = {*self.gathered}, {*self.in_backward}
        return found

    def _wanted(self, buffer: GradientBuffer) -> int:
        return buffer.num_grads * (1 if self.shards_grads else self.num_microbatches)

    def snapshot(self) -> tuple[object, ...]:
        """Return the state as a value; states with the same one act alike during the next microbatch."""
        limits = (2 * each.num_grads for each in self.buffers)
        places = tuple(self.has_whole), tuple(self.has_shard), tuple(self.reductions), frozenset(self.gathered)
        return tuple(map(min, self.missing, limits)), *places

    def begin(self, grads: Collection[int]) -> None:
        """Let these buffers be whole, to which gradients are about to be added."""
        for index in grads:
            if not self.has_whole[index]:
                self.has_whole[index] = True
                self.live += self.buffers[index].whole

    def add(self, grads: Collection[int]) -> int:
        """Let gradients of these buffers arrive; return the most bytes meanwhile."""
        top = self.live
        for index in grads:
            buffer = self.buffers[index]
            self.begin([index])
            self.missing[index] -= 1
            if not self.missing[index]:
                self.missing[index] = self._wanted(buffer)
                top = max(top, self.live, self._reduce(index))
        return max(top, self.live)

    def _reduce(self, index: int) -> int:
        buffer, top = self.buffers[index], self.live
        if self.is_sequential:
            top = self.advance()
        is_copied = buffer.sent != buffer.whole
        top = max(top, self.live + buffer.sent * is_copied)
        if self.shards_grads:
            self.has_whole[index] = False
            self.live -= buffer.whole
        self.live += buffer.sent + buffer.received
        self.reductions.append((index, False))
        return max(top, self.live)

    def advance(self) -> int:
        """Wait for the collective of each reduction, and start its next one; return the most bytes meanwhile."""
        left, top = list[tuple[int, bool]](), self.live
        for index, is_rest in self.reductions:
            buffer = self.buffers[index]
            if not is_rest:
                self.live += buffer.total
                top = max(top, self.live)
                self.live -= buffer.sent + buffer.received
            if buffer.has_rest and not is_rest:
                left.append((index, True))
                continue
            self.live -= buffer.total
            if not self.has_shard[index]:
                self.has_shard[index] = True
                self.live += buffer.shard
        self.reductions = left
        return top

    def _near(self, place: int, step: int) -> FsdpUnitSize | None:
        """Return the unit before or after this one in its stage."""
        other = place + step
        is_there = 0 <= other < len(self.units) and self.units[other].stage == self.units[place].stage
        return self.units[other] if is_there else None

    def _gather(self, unit: FsdpUnitSize | None) -> None:
        if unit is not None and unit.path not in self.gathered:
            self.gathered.add(unit.path)
            self.live += unit.num_bytes

    def _free(self, unit: FsdpUnitSize) -> None:
        if unit.path in self.gathered:
            self.gathered.remove(unit.path)
            self.live -= unit.num_bytes

    def before_forward(self, place: int) -> None:
        """Gather a unit and start to gather the next one; the last one starts those with which backward begins."""
        unit, after = self.units[place], self._near(place, 1)
        self._gather(unit)
        if unit.path in self.in_backward:
            return
        self._gather(after)
        if after is None and not unit.in_backward:
            inside = [each for each in self.units if each.stage == unit.stage and each.in_backward]
            for each in inside[::-1][:PREFETCHED_BY_HEAD]:
                self._gather(each)

    def after_forward(self, place: int) -> None:
        """Free a unit, unless backward uses it next."""
        unit, after = self.units[place], self._near(place, 1)
        if self.in_backward.isdisjoint({unit.path, after.path if after else unit.path}):
            self._free(unit)

    def before_backward(self, place: int) -> None:
        """Free the unit behind this one, gather it, and start to gather the one before it."""
        unit, before, after = self.units[place], self._near(place, -1), self._near(place, 1)
        if after is not None:
            self.in_backward.discard(after.path)
            self._free(after)
        self.in_backward.add(unit.path)
        self._gather(unit)
        self._gather(before if before is not None and before.in_backward else None)

    def after_backward(self, place: int) -> None:
        """Free a unit whose backward is over."""
        self.in_backward.discard(self.units[place].path)
        self._free(self.units[place])
