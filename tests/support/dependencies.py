"""The computations that a computation of a pipeline needs, written from the mathematics of a chain of stages."""

from __future__ import annotations

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
