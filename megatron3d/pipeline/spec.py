"""The pipeline of a run as one value: its stages, the rank that owns each, and the schedule of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.model.linear_spec import head_flops_per_token, layer_weights, mtp_linears, weights_of_layer
from megatron3d.model.spec import Architecture, keys_seen, layer_counts, mean_keys
from megatron3d.model.stage_plan import Stage, StageAssignment
from megatron3d.pipeline.actions import ActionKind, Schedule


@dataclass(frozen=True)
class Pipeline(StageAssignment):
    """Stages and their owners, and `schedule[rank]`: the computations of a pipeline rank in the order it runs them."""

    schedule: Schedule

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into an input gradient and a deferred weight gradient."""
        return any(action.kind is ActionKind.I for actions in self.schedule for action in actions)


def layer_flops(arch: Architecture, layer: int | None = None) -> Mapping[ActionKind, int]:
    """Return the FLOPs of one layer per token, by kind of computation.

    Forward, input gradient and weight gradient of a linear layer cost the same; the attention core has no weights and
    costs twice as much backward as forward.

    Args:
        layer: the layer, with its window and experts; default: the mean over all layers.
    """
    seen = mean_keys(arch) if layer is None else keys_seen(arch, layer)
    linear = 2 * (layer_weights(arch) if layer is None else weights_of_layer(arch, layer))
    core = round(4 * arch.num_attention_heads * arch.kv_channels * seen)
    return {ActionKind.F: linear + core, ActionKind.I: linear + 2 * core, ActionKind.W: linear}


def stage_flops(arch: Architecture, stage: Stage) -> Mapping[ActionKind, int]:
    """Return the FLOPs of a stage per token, by kind; the head computes its gradients in the forward, with the loss."""
    ahead = arch.mtp_num_layers if stage.has_head else 0
    linears = 2 * ahead * sum(linear.num_weights for linear in mtp_linears(arch).values())
    flops = dict.fromkeys((ActionKind.F, ActionKind.I, ActionKind.W), linears)
    for place, count in layer_counts(arch, [*stage.layers, *ahead * [arch.num_layers - 1]]).items():
        for kind, each in layer_flops(arch, place).items():
            flops[kind] += count * each
    head = (1 + ahead) * head_flops_per_token(arch) if stage.has_head else 0
    return {**flops, ActionKind.F: flops[ActionKind.F] + head, ActionKind.B: flops[ActionKind.I] + flops[ActionKind.W]}
