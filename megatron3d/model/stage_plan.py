"""Division of a model into pipeline stages: consecutive layers each, the embedding first, the final norm and head last.

embedding | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 | head        12 layers of work when the head costs as much as one layer

Modules of multi-token prediction are in the last stage, behind the head.  Layers may be of unequal work, such as those
with and without a window:

    work     9 1 1 1 | 9 1 | 1 1 9 | 1 9      the head's work added to the last stage

The least possible work of the busiest stage is found exactly: a limit is possible if stages filled up to it from the
last one hold all layers, so that it is searched by bisection.  Where ranks hold several stages, boundaries then move as
long as the busiest rank gets less work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from operator import itemgetter

from megatron3d.model.linear_spec import (
    flops_of_layer,
    head_flops_per_token,
    layer_flops_per_token,
    mtp_flops_per_token,
)
from megatron3d.model.spec import Architecture

Bounds = tuple[int, ...]
"""First layer of each stage, and the number of layers."""


@lru_cache(maxsize=256)
def balanced_counts(work: tuple[int, ...], head: int, owners: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one; `owners[stage]` is the rank of a stage."""
    sums = tuple(accumulate(work, initial=0))
    least = _filled(work, head, len(owners), _least_limit(work, head, len(owners)))
    assert least is not None, "the least limit is possible"
    starts = least, _shares(sums, head, len(owners))
    best = min((_improved(start, sums, head, owners) for start in starts), key=itemgetter(1))
    return tuple(high - low for low, high in pairwise(best[0]))


def _least_limit(work: Sequence[int], head: int, num_stages: int) -> int:
    """Return the least work of the busiest stage of any division."""
    low, high = max(*work, head + work[-1]) - 1, sum(work) + head
    while high - low > 1:
        middle = (low + high) // 2
        if _filled(work, head, num_stages, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _filled(work: Sequence[int], head: int, num_stages: int, limit: int) -> Bounds | None:
    """Return stages that are filled up to a limit from the last one; None where they do not hold all layers."""
    bounds, held = [len(work)], head
    for stage in reversed(range(num_stages)):
        low = bounds[-1]
        while low > stage and held + work[low - 1] <= limit:
            low -= 1
            held += work[low]
        if low == bounds[-1]:
            return None
        bounds.append(low)
        held = 0
    return tuple(reversed(bounds)) if bounds[-1] == 0 else None


def _shares(sums: Sequence[int], head: int, num_stages: int) -> Bounds:
    """Return the boundaries that are nearest to equal shares of the work."""
    bounds, num_layers = [0], len(sums) - 1
    for stage in range(1, num_stages):
        wanted = (sums[-1] + head) * stage / num_stages
        possible = range(bounds[-1] + 1, num_layers - (num_stages - stage) + 1)
        bounds.append(min(possible, key=lambda place: abs(sums[place] - wanted)))
    return (*bounds, num_layers)


def _cost(bounds: Bounds, sums: Sequence[int], head: int, owners: Sequence[int]) -> tuple[int, int]:
    """Return the work of the busiest rank, and the sum of squares of the stages' work."""
    stages = [sums[high] - sums[low] for low, high in pairwise(bounds)]
    stages[-1] += head
    ranks = [0] * (max(owners) + 1)
    for stage, owner in zip(stages, owners, strict=True):
        ranks[owner] += stage
    return max(ranks), sum(stage**2 for stage in stages)


def _improved(bounds: Bounds, sums: Sequence[int], head: int, owners: Sequence[int]) -> tuple[Bounds, tuple[int, int]]:
    """Return the division after all moves that lower its cost, and this cost."""
    found = bounds, _cost(bounds, sums, head, owners)
    while True:
        moved = ((other, _cost(other, sums, head, owners)) for other in _moves(found[0]))
        better = min(moved, key=itemgetter(1), default=found)
        if better[1] >= found[1]:
            return found
        found = better


def _moves(bounds: Bounds) -> Iterator[Bounds]:
    """Yield divisions in which neighbouring boundaries lie one layer further: a layer less here, one more there."""
    for first in range(1, len(bounds) - 1):
        for end in range(first + 1, len(bounds)):
            for step in (-1, 1):
                moved = (*bounds[:first], *(bound + step for bound in bounds[first:end]), *bounds[end:])
                if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                    yield moved


@dataclass(frozen=True)
class Stage:
    """Consecutive layers (perhaps none), and the embedding or LM head, that a pipeline rank computes as one action."""

    index: int
    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class StageAssignment:
    """All stages of the model and, in `owners[stage]`, the pipeline rank that holds each of them."""

    stages: tuple[Stage, ...]
    owners: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Size of the pipeline axis."""
        return max(self.owners) + 1

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of a pipeline rank, in order."""
        return tuple(stage for stage in self.stages if self.owners[stage.index] == rank)


def make_stages(counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return one stage per entry of `counts`, its number of layers, in the order of the layers."""
    ends, last = list(accumulate(counts)), len(counts) - 1
    return tuple(
        Stage(index, range(end - count, end), has_embedding=index == 0, has_head=index == last)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def divide(arch: Architecture, num_stages: int, owners: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one; `owners[stage]` is the pipeline rank of a stage."""
    return _divide(arch, num_stages, tuple(range(num_stages) if owners is None else owners))


@lru_cache(maxsize=64)
def _divide(arch: Architecture, num_stages: int, owners: tuple[int, ...]) -> tuple[int, ...]:
    """Return the division into stages of these owners.

    The cost of a layer, of the head and of multi-token prediction is its FLOPs; the embedding costs nothing.  Each
    layer goes to the rank with the lowest cost, and there to its cheapest stage, which minimizes the cost of the
    busiest rank.  Of stages with equal cost the last one gets the layer, since earlier stages have more microbatches in
    flight.  Where layers differ, as with windows in some of them, each counts its own FLOPs.
    """
    assert arch.num_layers >= num_stages, f"{arch.num_layers} layers are too few for {num_stages} stages"
    layer, head = layer_flops_per_token(arch), head_flops_per_token(arch) + mtp_flops_per_token(arch)
    work = tuple(flops_of_layer(arch, index) for index in range(arch.num_layers))
    if len(set(work)) > 1:
        return balanced_counts(work, head, owners)
    counts = [1] * num_stages

    def cost(stage: int) -> int:
        return counts[stage] * layer + head * (stage == num_stages - 1)

    stages_of: dict[int, list[int]] = defaultdict(list)
    for stage in range(num_stages):
        stages_of[owners[stage]].append(stage)

    def next_stage(rank: int) -> tuple[int, int, int]:
        """Return the cost of a rank, the cost of its cheapest stage, and this stage, negative."""
        return sum(map(cost, stages_of[rank])), *min((cost(stage), -stage) for stage in stages_of[rank])

    ranks = [next_stage(rank) for rank in stages_of]
    heapify(ranks)
    for _ in range(arch.num_layers - num_stages):
        stage = -ranks[0][2]
        counts[stage] += 1
        heapreplace(ranks, next_stage(owners[stage]))
    return tuple(counts)
