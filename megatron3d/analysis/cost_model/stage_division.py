"""Division of layers into pipeline stages by frameworks that do not balance them as this one does."""

from __future__ import annotations

from megatron3d.analysis.cost_model.execution_profile import ExecutionProfile
from megatron3d.config.run_spec import RunSpec
from megatron3d.model.architecture import Architecture


def divided_as(spec: RunSpec, profile: ExecutionProfile) -> RunSpec:
    """Return the run with the stages that a framework makes of its layers, where the run does not give them."""
    parallel = spec.config.parallel
    is_given = parallel.pipeline_model_parallel_layout is not None or spec.has_schedule_file
    if is_given or profile.stage_division == "balanced" or spec.sizes.pipeline == 1:
        return spec
    counts = _equal_stages(spec) if profile.stage_division == "equal" else _filled_stages(spec)
    if counts is None:
        return spec
    changed = parallel.model_copy(update={"pipeline_model_parallel_layout": counts})
    return spec.with_config(spec.config.model_copy(update={"parallel": changed}))


def _filled_stages(spec: RunSpec) -> tuple[int, ...] | None:
    return filled_stages(spec.arch, spec.sizes.pipeline) if spec.num_virtual_stages == 1 else None


def _equal_stages(spec: RunSpec) -> tuple[int, ...] | None:
    """Return as many layers for each stage, as Megatron-LM has them; None where they do not divide."""
    num_stages = spec.sizes.pipeline * spec.num_virtual_stages
    part, rest = divmod(spec.arch.num_layers, num_stages)
    return None if rest else (part,) * num_stages


def filled_stages(arch: Architecture, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage where one is filled until all so far have their part of the weights.

    The LM head counts as the last layer, so that the last stages may have no layer (nanotron,
    https://github.com/huggingface/nanotron/blob/main/src/nanotron/models/base.py).
    """
    hidden = arch.hidden_size
    layer = (4 * arch.num_attention_heads * arch.kv_channels + 3 * arch.ffn_hidden_size) * hidden
    total = arch.num_layers * layer + arch.padded_vocab_size * hidden
    counts, stage = [0] * num_stages, 0
    for index in range(arch.num_layers):
        counts[stage] += 1
        stage += (index + 1) * layer * num_stages >= (stage + 1) * total
    return tuple(counts)
