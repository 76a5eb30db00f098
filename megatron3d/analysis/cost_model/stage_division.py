"""Division of layers into pipeline stages by frameworks that do not balance them as this one does."""

from __future__ import annotations

from megatron3d.analysis.cost_model.execution_profile import ExecutionProfile
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.architecture import Architecture


def divided_as(spec: RunSpec, profile: ExecutionProfile) -> RunSpec:
    """Return the run with the stages that a framework makes of its layers, where the run does not give them."""
    parallel = spec.config.parallel
    is_given = parallel.pipeline_model_parallel_layout is not None or spec.has_schedule_file
    if is_given or not profile.fills_stages or spec.sizes.pipeline == 1 or spec.num_virtual_stages > 1:
        return spec
    counts = filled_stages(spec.arch, spec.sizes.pipeline)
    changed = parallel.model_copy(update={"pipeline_model_parallel_layout": counts})
    return spec.with_config(spec.config.model_copy(update={"parallel": changed}))


def filled_stages(arch: Architecture, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage where one is filled until all so far have more than their part of the weights.

    The LM head counts as the last layer, so that the last stages may have no layer (nanotron,
    https://github.com/huggingface/nanotron/blob/main/src/nanotron/models/base.py).
    """
    hidden = arch.hidden_size
    layer = (4 * arch.num_attention_heads * arch.kv_channels + 3 * arch.ffn_hidden_size) * hidden
    total = arch.num_layers * layer + arch.padded_vocab_size * hidden
    counts, stage = [0] * num_stages, 0
    for index in range(arch.num_layers):
        counts[stage] += 1
        stage += (index + 1) * layer * num_stages > (stage + 1) * total
    return tuple(counts)
