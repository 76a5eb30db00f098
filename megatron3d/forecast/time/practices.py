"""Execution profiles of this framework (`OURS`) and of those whose published runs validate the cost model.

A framework is a series of functions from our list of a layer's tasks (`tasks.py`) to its own, and what a step has
besides.  Each number is counted from the kernels that the framework ran.  What no data sheet gives and no kernel count
shows is fitted to published runs and stands in `fitted.yaml`, which `benchmarks/fit_cost_model.py` writes:

    GEMMs, attention, other kernels, bytes on links   x factor
    host time of a layer                              a floor under its kernels
    collective                                        + time of a call, + time of each step of a ring between nodes
    step                                              x (1 + jitter log2(data-parallel ranks))
    memory of activations, of gathered inputs         x factor, + bytes of the logits of a whole microbatch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron3d.config.read import nearest, one_of
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.yaml_origins import read_yaml
from megatron3d.errors import UserError
from megatron3d.forecast.time.tasks import (
    ACCUMULATION,
    AGAIN,
    CONCAT,
    DGRAD,
    GEMM,
    INPUT_GRAD,
    KERNELS,
    NO_ACCESS,
    OPERANDS,
    OPERANDS_IN_ROUNDS,
    ROUNDS,
    SPLIT_DGRAD,
    TOKENS,
    TWO_COPIES,
    WEIGHT_GRAD,
    MemoryAccesses,
    Task,
    in_memory,
)
from megatron3d.model.local_sizes import LocalSizes
from megatron3d.model.spec import Architecture
from megatron3d.runtime.arguments import shorten

Factor = Annotated[float, Field(ge=0.2, le=20)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
# An allocator never holds less than the tensors.
AtLeast1 = Annotated[float, Field(ge=1, le=20)]


class FittedTerms(BaseModel):
    """Fitted terms of one practice.

    Attributes:
        products: time of GEMMs that compute, relative to the accelerator's `matmul_fraction`.
        attention: time of fused attention, relative to the accelerator's `attention_fractions`.
        memory: time of memory-bound kernels, relative to counted accesses at the accelerator's bandwidth.
        hidden_tax: slowdown of computation per second of communication that overlaps with it, on top of the
            multiprocessors that a collective takes.
        host_layer_us: time that the host needs to launch forward and backward of a layer for one microbatch.
        host_tensor_us: the same on top for each other tensor-parallel rank, whose hosts wait for one another.
        degraded_host_us, degraded_host_tensor_us: the same on top of both on a degraded cluster.
        host_nodes: exponent with which all of these grow with the nodes of a tensor-parallel group.
        call_us: time of a collective on top of the cluster's.
        hop_us: time of each step of a ring between nodes on top of the cluster's.
        inner, outer: time of a collective's bytes inside a node and between nodes, relative to the cluster's links.
        fall: exponent with which `outer` grows with the nodes of a group.
        jitter: part of a step that is lost for each doubling of data-parallel ranks.
        activation_memory: bytes reserved for activations and transient tensors, relative to those tensors.
        logit_memory: bytes reserved for each logit of a whole microbatch, where the loss takes no chunks.
        gathered_memory: bytes reserved for gathered inputs of linears that a host launches ahead of its accelerator,
            relative to those tensors (`forecast/memory/rank.py`).
        spread: 10th and 90th percentile of measured over predicted step times in the held-out folds.
        memory_spread: the same of reserved over predicted bytes of memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    products: Factor = 1.0
    attention: Factor = 1.0
    memory: Factor = 1.0
    hidden_tax: AtLeast0 = 0.0
    host_layer_us: AtLeast0 = 0.0
    host_tensor_us: AtLeast0 = 0.0
    degraded_host_us: AtLeast0 = 0.0
    degraded_host_tensor_us: AtLeast0 = 0.0
    host_nodes: Annotated[float, Field(ge=0, le=3)] = 0.0
    call_us: AtLeast0 = 0.0
    hop_us: AtLeast0 = 0.0
    inner: Factor = 1.0
    outer: Factor = 1.0
    fall: Annotated[float, Field(ge=0, le=3)] = 0.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    activation_memory: AtLeast1 = 1.0
    logit_memory: AtLeast0 = 0.0
    gathered_memory: AtLeast0 = 0.0
    spread: tuple[Factor, Factor] = (0.8, 1.25)
    memory_spread: tuple[Factor, Factor] = (0.8, 1.25)


NEUTRAL = FittedTerms()


# Collectives of a step that overlap with computation: gradient reductions with the last backward, all-gathers of
# weights with the forward, send/recv between stages.
GRADIENTS, WEIGHTS, STAGES = "gradients", "weights", "stages"

Rewrite = Callable[[Sequence[Task], LocalSizes], Iterable[Task]]


def with_kernels(**accesses: MemoryAccesses) -> Rewrite:
    """Return the rewrite to other memory-bound kernels of these kinds; `accumulation` has bytes per weight."""

    def rewrite(tasks: Sequence[Task], _: LocalSizes) -> Iterator[Task]:
        for task in tasks:
            if (own := accesses.get(task.what)) is None:
                yield task
            else:
                yield task._replace(accesses=own.of(task.phases), num_kernels=own.num_kernels)

    return rewrite


def accumulating(num_bytes: float) -> Rewrite:
    """Return the rewrite to gradients whose accumulation moves `num_bytes` per weight and microbatch."""
    return with_kernels(accumulation=MemoryAccesses(num_bytes, num_bytes))


def with_loss(num_bytes: float) -> Rewrite:
    """Return the rewrite to a loss that moves `num_bytes` per logit, with its gradient and without its GEMMs."""
    return lambda tasks, local: with_kernels(loss=MemoryAccesses(num_bytes / local.itemsize, 0, 10))(tasks, local)


def without(*what: str) -> Rewrite:
    """Return the rewrite that leaves tasks out."""
    return lambda tasks, _: (task for task in tasks if task.what not in what)


def writes_scores(accesses: MemoryAccesses) -> Rewrite:
    """Return the rewrite to attention that writes its scores to memory, instead of one kernel (FlashAttention)."""

    def rewrite(tasks: Sequence[Task], local: LocalSizes) -> Iterator[Task]:
        for task in tasks:
            yield from (task,) if task.scores is None else in_memory(task, accesses, local)

    return rewrite


def narrow_wgrads(tasks: Sequence[Task], local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks with dW reduced over tensor axes in the model's dtype."""
    part = local.itemsize / local.wgrad_itemsize
    for task in tasks:
        if task.what == WEIGHT_GRAD:
            task = task._replace(calls=[call._replace(wire_bytes=part * call.wire_bytes) for call in task.calls])
        yield task


def waits_for_input_grads(tasks: Sequence[Task], _: LocalSizes) -> Iterator[Task]:
    """Yield the tasks where dX is reduced before the wgrad GEMM begins, in an unsplit backward as in a split one."""
    for task in tasks:
        if task.what in (OPERANDS, OPERANDS_IN_ROUNDS, ROUNDS) and task.phases == SPLIT_DGRAD:
            yield task._replace(phases=DGRAD)
        elif task.what != INPUT_GRAD:
            yield task


def in_chunks(tasks: Sequence[Task], local: LocalSizes) -> Iterator[Task]:
    """Yield the tasks with operands of linears in as many chunks as ranks, each behind the GEMM of another."""
    for task in tasks:
        if task.what == OPERANDS:
            part = 1 - 1 / local.mesh.size(task.calls[0].axes)
            task = task._replace(behind=(task.operation,), most=part, share=part)
        yield task


def stops_early(tasks: Sequence[Task], _: LocalSizes) -> Iterator[Task]:
    """Yield the tasks without the GEMM that a recomputed layer ends with: backward needs only its input.

    What follows it is the addition to the residual stream.
    """
    last = [*dict.fromkeys(task.operation for task in tasks)][-2:][0]
    return (task for task in tasks if (task.operation, task.what, task.phases) != (last, GEMM, AGAIN))


@dataclass(frozen=True)
class ExecutionProfile:
    """Execution of a framework as far as a layout does not determine it; the numbers are counted from its kernels.

    Attributes:
        rewrites: from the tasks of this framework to those of another one, in order.
        alone: tasks of a layer (`Task.what`) and collectives of a step that overlap with nothing.
        chunks_loss: the loss takes chunks of tokens.
        optimizer_bytes: bytes moved per parameter besides the update: norm, clipping, copy to the network's dtype.
        reduce_itemsize: bytes of a gradient element in the data-parallel reduction; None: as accumulated.
        scatters_pipeline: activations that tensor-parallel ranks replicate are sent in shards and all-gathered by the
            receivers (Megatron-LM's scatter/gather).
        validates_later: with a split backward, ranks start their optimizer step without waiting for each other and
            validate the gradient norm later, so that the slowest rank's own time decides (Qi et al. 2023, section 4).
        stage_division: how layers are divided into pipeline stages: `balanced` as here, `equal`, or `filled` one after
            another (`divided_as`).
        reduces_buckets: each bucket of gradients is reduced, and its weights all-gathered, with a latency of its own.
        bucket_itemsize: bytes of an element of buckets that hold all gradients a second time where ranks reduce them.
        measured_rates: it computes at the rates of today's kernels, where an accelerator's file has them, in place of
            those of published runs.
        fitted: terms that are fitted to published runs (`FittedTerms`).
    """

    name: str
    rewrites: tuple[Rewrite, ...] = ()
    alone: frozenset[str] = frozenset()
    chunks_loss: bool = False
    optimizer_bytes: float = 12.0
    reduce_itemsize: int | None = None
    scatters_pipeline: bool = True
    validates_later: bool = False
    stage_division: Literal["balanced", "equal", "filled"] = "balanced"
    reduces_buckets: bool = False
    bucket_itemsize: int = 0
    measured_rates: bool = False
    fitted: FittedTerms = NEUTRAL

    def rewritten(self, tasks: Sequence[Task], local: LocalSizes) -> Sequence[Task]:
        """Return this framework's tasks for those of ours."""
        for rewrite in self.rewrites:
            tasks = [*rewrite(tasks, local)]
        if not self.alone:
            return tasks
        return [task._replace(behind=()) if task.what in self.alone else task for task in tasks]

    def also(self, *rewrites: Rewrite, **changed: Any) -> ExecutionProfile:
        """Return a framework with further rewrites, and other fields."""
        return replace(self, rewrites=self.rewrites + rewrites, **changed)


# torch's own kernels, and ours.  optimizer_bytes: gradient norm (4), cast to the network's dtype (4 + 2).
OURS = ExecutionProfile("megatron3d", chunks_loss=True, optimizer_bytes=10.0, measured_rates=True)

FITTED = Path(__file__).with_name("fitted.yaml")
# Between the names of a practice and of a kind of accelerator.
ON = " on "

# torch.compile fuses each run of elementwise kernels; of ours these are those of the rotary embedding.
COMPILED = with_kernels(rotary=TWO_COPIES)
# Other frameworks concatenate in place, reduce dW in the model's dtype, and wait for tokens on their way to experts.
# Unless they say otherwise below, gradients are accumulated by a kernel of its own.
OTHERS = ExecutionProfile(
    "others", (without(CONCAT), narrow_wgrads, COMPILED, with_loss(48.0)), frozenset({ACCUMULATION, TOKENS})
)

# torch's own kernels, compiled.  Its checkpointing recomputes a layer as far as the last tensor that backward needs,
# which is the input of the last linear.
PYTORCH = OTHERS.also(stops_early, with_loss(44.0), name="PyTorch", optimizer_bytes=10.0)

# Megatron-LM of 2022 (Korthikanti et al., arXiv:2205.05198), with the kernels that Narayanan et al. 2021
# (arXiv:2104.04473, section 4.2) describe: fused bias and GELU; fused bias, dropout and addition; fused scale, mask and
# softmax; everything else by torch.
# Scores, in fp16 accesses: forward softmax (reads the causal half, writes all) 1.5, dropout 2 and its byte mask 0.5;
# backward dropout 2.5, softmax 3, each on all scores.  Gradients are accumulated in fp16 (2 + 2 + 2).
# optimizer_bytes: cast to fp32 (2 + 4), unscale and check for infinities (8), norm (4), clip (8), cast back (4 + 2).
MEGATRON_2022 = OTHERS.also(
    writes_scores(MemoryAccesses(4.0, 5.5, 2)),
    with_kernels(dropout=MemoryAccesses(0.5, 2.5), layout=MemoryAccesses(4, 4, 2)),
    accumulating(6.0),
    with_loss(50.0),
    name="Megatron-LM, 2022",
    alone=OTHERS.alone | {GRADIENTS, WEIGHTS, STAGES},
    stage_division="equal",
    optimizer_bytes=32.0,
    reduce_itemsize=2,
)

# One year earlier the dgrad reduction does not overlap with the wgrad GEMM either.
MEGATRON_2021 = MEGATRON_2022.also(waits_for_input_grads, name="Megatron-LM, 2021")

# One year later: `gradient_accumulation_fusion`, fp32 gradients accumulated by the GEMM (reads and writes 4 bytes),
# and the distributed optimizer's fp32 reduction over the data axis.
MEGATRON_2023 = MEGATRON_2022.also(
    accumulating(8.0),
    name="Megatron-LM, 2023",
    alone=MEGATRON_2022.alone - {ACCUMULATION},
    reduce_itemsize=None,
)

# Its fork with zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241, section 4), which validates the optimizer step
# later.
ZERO_BUBBLE = MEGATRON_2023.also(name="Zero Bubble, 2023", validates_later=True)

# Megatron-Core 0.8 with Transformer Engine: fused attention, gradient accumulation as in 2023, `--tp-comm-overlap`,
# `--overlap-grad-reduce`, `--overlap-param-gather`.
MEGATRON_CORE = OTHERS.also(
    with_kernels(layout=NO_ACCESS),
    accumulating(8.0),
    with_loss(54.0),
    in_chunks,
    name="Megatron-Core 0.8",
    alone=OTHERS.alone - {ACCUMULATION},
    stage_division="equal",
    optimizer_bytes=18.0,
)

# llm.c of 2024: kernels of its own for everything between the GEMMs.  A residual addition writes its sum and the next
# norm's output; a norm's backward adds to the residual's gradient in place; the loss reads the logits twice and
# overwrites them with their gradient (2 + 2 + 2); bf16 gradients are accumulated by the GEMM (2 + 2) and reduced in
# bf16.  optimizer_bytes: norm (2) and the cast (2), less the 2 that AdamW saves with a gradient in bf16.
LLM_C = OTHERS.also(
    with_kernels(norm=MemoryAccesses(2, 4), add=MemoryAccesses(2, 0), layout=NO_ACCESS),
    accumulating(4.0),
    with_loss(6.0),
    name="llm.c",
    alone=OTHERS.alone - {ACCUMULATION},
    optimizer_bytes=2.0,
    reduce_itemsize=2,
)

# torchtitan, OLMo-core and their kin: parameters sharded over all data-parallel ranks by FSDP units.
PYTORCH_FSDP = replace(PYTORCH, name="PyTorch FSDP")

# AxoNN of 2023, with the model and the checkpointing of Megatron-LM, which recomputes whole layers.
AXONN = OTHERS.also(with_loss(44.0), name="AxoNN", optimizer_bytes=10.0)

# nanotron (Hugging Face): eager kernels of torch with FlashAttention 2; the distributed optimizer's all-gather and the
# sends of the pipeline are not overlapped, the gradient reduction is, in the buckets of torch's DDP, which hold the
# bf16 gradients beside those that are accumulated in fp32.
NANOTRON = PYTORCH.also(
    with_kernels(rotary=KERNELS["rotary"]),
    waits_for_input_grads,
    name="nanotron",
    alone=PYTORCH.alone | {WEIGHTS, STAGES},
    stage_division="filled",
    reduces_buckets=True,
    bucket_itemsize=2,
)

# Megatron-DeepSpeed: kernels of Megatron-LM of its time, gradients reduced in 16 bits and overlapped.
DEEPSPEED = replace(MEGATRON_2021, name="DeepSpeed", alone=MEGATRON_2021.alone - {GRADIENTS})

PROFILES: Mapping[str, ExecutionProfile] = {
    profile.name: profile
    for profile in (
        *(OURS, PYTORCH, PYTORCH_FSDP, NANOTRON, DEEPSPEED, AXONN),
        *(MEGATRON_2021, MEGATRON_2022, MEGATRON_2023, ZERO_BUBBLE, MEGATRON_CORE, LLM_C),
    )
}


@cache
def fitted_terms() -> Mapping[str, FittedTerms]:
    """Return the fitted terms by practice.  Raises UserError if the file is damaged."""
    try:
        document = read_yaml(FITTED)
        assert isinstance(document, dict), f"{FITTED.name}: a mapping of practices"
        return {name: FittedTerms.model_validate(terms) for name, terms in document.items()}
    except ValidationError as error:
        raise UserError(f"{FITTED.name}: {error.errors()[0]['msg']}; run benchmarks/fit_cost_model.py") from error


def practice(name: str, accelerator: str = "") -> ExecutionProfile:
    """Return a framework's execution profile with its fitted terms; case does not matter.  Raises UserError.

    Where the terms of a framework are fitted for a kind of accelerator, as for `a100`, its file's name starts so.
    """
    known = {each.lower(): each for each in PROFILES}
    if name.lower() not in known:
        likely = nearest(name.lower(), known)
        raise UserError(f"practice={shorten(name)}: unknown; use {known[likely] if likely else one_of(PROFILES)}")
    profile = PROFILES[known[name.lower()]]
    kinds = {key.partition(ON)[2]: terms for key, terms in fitted_terms().items() if key.startswith(profile.name + ON)}
    own = next((terms for kind, terms in kinds.items() if Path(accelerator).stem.startswith(kind)), None)
    return replace(profile, fitted=own or fitted_terms().get(profile.name, NEUTRAL))


def divided_as(spec: RunSpec, profile: ExecutionProfile) -> RunSpec:
    """Return the run with the stages that a framework makes of its layers, unless given, or not divisible."""
    parallel = spec.config.parallel
    is_given = parallel.pipeline_model_parallel_layout is not None or spec.has_schedule_file
    if is_given or profile.stage_division == "balanced" or spec.sizes.pipeline == 1:
        return spec
    num_stages = spec.sizes.pipeline * spec.num_virtual_stages
    if profile.stage_division == "equal":  # as Megatron-LM has them
        each, rest = divmod(spec.arch.num_layers, num_stages)
        counts = () if rest else (each,) * num_stages
    else:
        counts = filled_stages(spec.arch, num_stages) if spec.num_virtual_stages == 1 else ()
    if not counts:
        return spec
    changed = parallel.model_copy(update={"pipeline_model_parallel_layout": counts})
    return spec.with_config(spec.config.model_copy(update={"parallel": changed}))


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
