"""Memory that the allocator of another framework reserves for its tensors: this framework's, with fitted terms.

    (weights + gradients + optimizer + buffers) x state + (activations + transient peak) x activations + logits x bytes

Other frameworks keep the logits of a whole microbatch, and their kernels leave more to the allocator.  The terms are
fitted to published runs (`benchmarks/fit_memory.py`); neutral ones change nothing.
"""

from __future__ import annotations

from dataclasses import replace

from megatron3d.analysis.cost_model.fitted_terms import FittedTerms
from megatron3d.analysis.memory_model.local_sizes import LocalSizes
from megatron3d.analysis.memory_model.rank import RankMemory, rank_memory
from megatron3d.analysis.memory_model.step_spec import StepSpec


def reserved_memory(step: StepSpec, terms: FittedTerms) -> RankMemory:
    """Return the memory that is reserved on the rank that the step's mesh is seen from."""
    return reserved_for(rank_memory(step), num_logits(step), terms)


def reserved_for(memory: RankMemory, logits: int, terms: FittedTerms) -> RankMemory:
    """Return the memory that is reserved for tensors of these bytes and this number of logits."""
    of_logits = terms.logit_memory * logits
    peaks = {name: round(size * terms.activation_memory + of_logits) for name, size in memory.transient_peaks.items()}
    state = {
        name: round(getattr(memory, name) * terms.state_memory)
        for name in ("weights", "main_weights", "gradients", "optimizer", "buffers")
    }
    return replace(
        memory, **state, activations=round(memory.activations * terms.activation_memory), transient_peaks=peaks
    )


def num_logits(step: StepSpec) -> int:
    """Return the logits of a microbatch on this rank; none where no stage has the head."""
    return _logits(step.local) if any(stage.has_head for stage in step.stages) else 0


def _logits(local: LocalSizes) -> int:
    plan = local.mode.expand.on(local.mesh)
    tokens, columns = plan.y_layout
    return local.part(local.num_tokens, tokens) * local.part(local.arch.padded_vocab_size, columns)
