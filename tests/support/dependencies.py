"""The computations that a computation of a pipeline needs, written from the mathematics of a chain of stages."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from megatron3d.pipeline.actions import Action, ActionKind


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the computations whose results a computation consumes."""
    kind, stage, mb = action
    if kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, mb),) if stage else ()
    if kind is ActionKind.W:
        return (Action(ActionKind.I, stage, mb),)
    from_next = (Action(ActionKind.I, stage + 1, mb),) if stage + 1 < num_stages else ()
    return (Action(ActionKind.F, stage, mb), *from_next)


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """Return the cells of each rank of torch's DualPipeV, as its schedules are written to CSV files."""
    torchs = SimpleNamespace(pp_group_size=num_ranks, _n_microbatches=num_microbatches)
    rows = (ScheduleDualPipeV._calculate_single_rank_operations(torchs, rank) for rank in range(num_ranks))
    return [["" if action is None else str(action) for action in row] for row in rows]
