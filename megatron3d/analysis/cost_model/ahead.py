"""Time of a module of multi-token prediction: embedding, two norms and linears, a layer, and the LM head again."""

from __future__ import annotations

from megatron3d.analysis.cost_model.breakdown import MEMORY, TimeBreakdown, combine
from megatron3d.analysis.cost_model.layer import (
    LayerTimes,
    LinearTime,
    Machine,
    OverlapModel,
    linears_backward,
    linears_forward,
)
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.parallel.relayouts import relayout_traffic
from megatron3d.pipeline.actions import ActionKind

Ends = tuple[TimeBreakdown, TimeBreakdown]


def module_times(
    local: LocalSizes, machine: Machine, layer: LayerTimes, embedding: Ends, head: TimeBreakdown
) -> dict[ActionKind, TimeBreakdown]:
    """Return the times of one module by kind of computation; `embedding` are those of its forward and its backward."""
    rest, none = ahead_times(local, machine), TimeBreakdown()
    ends = embedding[0].plus(head), none, embedding[1], embedding[1]
    kinds = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B
    return {kind: combine(times) for kind, *times in zip(kinds, layer, rest, ends, strict=True)}


def ahead_times(local: LocalSizes, machine: Machine) -> LayerTimes:
    """Return the times of a module of multi-token prediction without its layer, its embedding and its LM head.

    They are two norms, two linears and their sum, and the all-gathers back to the layout of the residual stream.
    """
    planned = {name: LinearTime.of(matmul, local, machine) for name, matmul in local.mtp_matmuls.items()}
    over = OverlapModel(machine, local.mesh, local.overlap.num_panels)
    mode, size, norm = local.mode, machine.device.itemsize, machine.profile.norm
    elements, whole_bytes = local.tokens * local.hidden, local.num_tokens * local.arch.hidden_size * size
    changes = [(mode.inner, mode.residual), (mode.residual, mode.inner)]
    there, back = (over.exposed(relayout_traffic(*layouts, local.mesh, whole_bytes)) for layouts in changes)
    normed, unnormed = (
        TimeBreakdown({MEMORY: 2 * machine.device.memory_bound_s(elements * (passes + add) * size, 2)})
        for passes, add in ((norm.forward, 1.5), (norm.backward, 0))
    )
    forward = combine((linears_forward(planned, over, local, machine), normed, there))
    back_i, back_w, whole = linears_backward(planned, over, local, machine)
    again = forward if local.recompute.recomputes_ahead else TimeBreakdown()
    return LayerTimes(
        forward, combine((back_i, unnormed, back, again)), back_w, combine((whole, unnormed, back, again))
    )
