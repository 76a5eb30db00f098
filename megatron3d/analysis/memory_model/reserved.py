"""Memory that the allocator of another framework reserves for its tensors: this framework's, and what it adds.

    weights + gradients + optimizer + buffers + (activations + transient peak) x factor
    + logits x bytes + gathered inputs of linears x factor

Other frameworks keep the logits of a whole microbatch, some a second copy of the gradients, and their kernels leave
more to the allocator.  It cannot use the memory of a gathered input again before the accelerator is done with it, so
that a host that launches ahead makes it reserve one for each layer.  The terms are fitted to published runs
(`benchmarks/fit_memory.py`); neutral ones change nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megatron3d.analysis.cost_model.execution_profile import ExecutionProfile
from megatron3d.analysis.memory_model.activation_peaks import in_flight
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.rank import RankMemory, rank_memory
from megatron3d.analysis.memory_model.step_spec import StepSpec

# A pipeline rank waits for the gradients of its first microbatch when it has launched the forwards of all in flight.
# Fitted to pipelines of 2 to 32 stages: as much as two of them are done by then.
_DONE = 2


def reserved_memory(step: StepSpec, profile: ExecutionProfile) -> RankMemory:
    """Return the memory that is reserved on the rank that the step's mesh is seen from."""
    return reserved_for(rank_memory(step), step, profile)


def reserved_for(memory: RankMemory, step: StepSpec, profile: ExecutionProfile) -> RankMemory:
    """Return the memory that is reserved for these tensors of a rank."""
    terms = profile.fitted
    of_logits = terms.logit_memory * num_logits(step) if terms.logit_memory else 0
    of_gathers = terms.gathered_memory * gathered_inputs(step) if terms.gathered_memory else 0
    peaks = {name: round(size * terms.activation_memory + of_logits) for name, size in memory.transient_peaks.items()}
    return replace(
        memory,
        gradients=memory.gradients + bucket_copies(memory, step, profile),
        activations=round(memory.activations * terms.activation_memory),
        buffers=memory.buffers + round(of_gathers),
        transient_peaks=peaks,
    )


def bucket_copies(memory: RankMemory, step: StepSpec, profile: ExecutionProfile) -> int:
    """Return the bytes of buckets that hold the gradients a second time; none where no other rank has some."""
    local = step.local
    is_reduced = local.mesh.size(local.mesh.zero) > 1
    return memory.weights // local.itemsize * profile.bucket_itemsize if is_reduced else 0


def num_logits(step: StepSpec) -> int:
    """Return the logits of a microbatch on this rank; none where no stage has the head."""
    return _logits(step.local) if any(stage.has_head for stage in step.stages) else 0


def gathered_inputs(step: StepSpec) -> float:
    """Return the bytes of the gathered inputs of linears in all microbatches whose forward a host launches ahead.

    Without a pipeline that is one microbatch, in pipelines all in flight but two.
    """
    if step.local.mesh.sizes["pipeline"] == 1:
        ahead = dict.fromkeys((stage.index for stage in step.stages), 1.0)
    else:
        ahead = {index: max(number - _DONE, 0.0) for index, number in in_flight(step).items()}
    return sum(ahead[stage.index] * _gathered_by_layers(step.local, stage.layers) for stage in step.stages)


def _gathered_by_layers(local: LocalSizes, layers: range) -> int:
    return sum(count * _gathered(each) for each, count in local.by_kind(layers))


def _gathered(local: LocalSizes) -> int:
    """Return the bytes of the gathered inputs of a layer's linears."""
    sizes = (
        (matmul.x, math.prod(map(local.mesh.sizes.__getitem__, matmul.plan.x))) for matmul in local.matmuls.values()
    )
    return local.itemsize * sum(x * ranks for x, ranks in sizes if ranks > 1)


def _logits(local: LocalSizes) -> int:
    plan = local.mode.expand.on(local.mesh)
    tokens, columns = plan.y_layout
    return local.part(local.num_tokens, tokens) * local.part(local.arch.padded_vocab_size, columns)
