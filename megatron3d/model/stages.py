"""Division of a model into pipeline stages: consecutive layers each, the embedding first, the final norm and head last.

embedding | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 | head        12 layers of work when the head costs as much as one layer

Modules of multi-token prediction are in the last stage, behind the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate

from megatron3d.model.architecture import Architecture
from megatron3d.model.flops import flops_of_layer, head_flops_per_token, layer_flops_per_token, mtp_flops_per_token
from megatron3d.model.stage_balance import balanced_counts


@dataclass(frozen=True)
class Stage:
    """Consecutive layers (perhaps none), and the embedding or LM head, that a pipeline rank computes as one action."""

    index: int
    layers: range
    has_embedding: bool
    has_head: bool

    @staticmethod
    def whole(num_layers: int) -> Stage:
        """Return the only stage of a model without pipeline parallelism."""
        return Stage(0, range(num_layers), has_embedding=True, has_head=True)


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
    """Return the number of layers of each stage, at least one; `owners[stage]` is the pipeline rank of a stage.

    The cost of a layer, of the head and of multi-token prediction is its FLOPs (see `_divide`).
    """
    return _divide(arch, num_stages, tuple(range(num_stages) if owners is None else owners))


@lru_cache(maxsize=64)
def _divide(arch: Architecture, num_stages: int, owners: tuple[int, ...]) -> tuple[int, ...]:
    """Return the division of `divide`.

    The cost of a layer, of the head and of multi-token prediction is its FLOPs; the embedding costs nothing.  Each
    layer goes to the rank with the lowest cost, and there to its cheapest stage, which minimizes the cost of the
    busiest rank.  Of stages with equal cost the last one gets the layer, since earlier stages have more microbatches in
    flight.  Where layers differ, as with windows in some of them, each counts its own FLOPs (`stage_balance.py`).
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
