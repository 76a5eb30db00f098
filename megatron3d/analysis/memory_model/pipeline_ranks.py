"""Memory of the pipeline rank that needs most, which with uneven stages may be any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron3d.analysis.cost_model.execution_profile import OURS, ExecutionProfile
from megatron3d.analysis.memory_model.rank import MemoryOfRank, RankMemory
from megatron3d.analysis.memory_model.reserved import reserved_for
from megatron3d.analysis.memory_model.step_spec import StepSpec

# Pipelines of at most this number of ranks are looked at in full.
FEW = 8


def largest_rank_memory(step: StepSpec, profile: ExecutionProfile = OURS) -> RankMemory:
    """Return the memory of the pipeline rank that needs most, as a framework with this profile reserves it."""
    found = fitting_rank_memory(step, math.inf, profile)
    assert found is not None, "every memory fits into infinite memory"
    return found


def fitting_rank_memory(step: StepSpec, most: float, profile: ExecutionProfile = OURS) -> RankMemory | None:
    """Return the memory of the pipeline rank that needs most, or None as soon as one is found that needs more bytes
    than `most`: the others are not looked at."""
    found: list[RankMemory] = []
    for coord in candidates(step):
        here = step.on_pipeline_rank(coord)
        rank = MemoryOfRank(here)
        if rank.least_bytes > most:  # no framework reserves less than the tensors
            return None
        found.append(reserved_for(rank.memory, here, profile))
        if found[-1].total > most:
            return None
    return max(found, key=lambda each: each.total)


def candidates(step: StepSpec) -> Sequence[int]:
    """Return the pipeline ranks among which one needs most: of those that hold alike stages, both ends and the middle.

    Along a pipeline, microbatches in flight fall, rise or stay; only what a rank holds can change the order.
    """
    num_ranks = step.pipeline.num_ranks
    if num_ranks <= FEW:
        return range(num_ranks)
    alike: dict[object, list[int]] = {}
    for coord in range(num_ranks):
        stages = step.on_pipeline_rank(coord).stages
        held = tuple((len(stage.layers), stage.has_embedding, stage.has_head) for stage in stages)
        alike.setdefault(held, []).append(coord)
    chosen = {coords[at] for coords in alike.values() for at in (0, len(coords) // 2, -1)}
    return sorted(chosen)
