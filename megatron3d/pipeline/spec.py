"""The pipeline of a run: its stages, the schedule of every pipeline rank, and which rank owns which stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron3d.model.stages import Stage
from megatron3d.pipeline.actions import Kind, Schedule


@dataclass(frozen=True)
class Pipeline:
    """Stages and schedule of a pipeline.

    Attributes:
        stages: all stages, in the order of the layers.
        schedule: the computations of every pipeline rank, in order.
        owners: `owners[stage]` is the pipeline rank that holds a stage.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    owners: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Size of the pipeline axis."""
        return len(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has separate dgrad and wgrad actions (zero-bubble schedules)."""
        return any(action.kind is Kind.I for actions in self.schedule for action in actions)

    def mine(self, coord: int) -> tuple[Stage, ...]:
        """Stages of the pipeline rank `coord`, in the order of the layers."""
        return tuple(stage for stage in self.stages if self.owners[stage.index] == coord)
