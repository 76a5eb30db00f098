"""Execution profiles of this framework (`OURS`) and of those whose published runs validate the cost model.

Each number of a profile is counted from the kernels that the framework ran.  What no data sheet gives and no kernel
count shows is fitted to published runs and stands in `fitted.yaml`, which `benchmarks/fit_cost_model.py` writes:

    GEMMs, attention, other kernels, bytes on links   x factor
    host time of a layer                              a floor under its kernels
    collective                                        + time of a call, + time of each step of a ring between nodes
    step                                              x (1 + jitter log2(data-parallel ranks))
    memory of activations, of gathered inputs         x factor, + bytes of the logits of a whole microbatch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron3d.config.read import nearest, one_of
from megatron3d.config.run_spec import RunSpec
from megatron3d.config.yaml_origins import read_yaml
from megatron3d.errors import UserError
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


class MemoryAccesses(NamedTuple):
    """Reads and writes of each element of a tensor by memory-bound kernels, forward and backward, and their number."""

    forward: float
    backward: float
    num_kernels: int = 1


NO_ACCESS = MemoryAccesses(0, 0)
UNARY = MemoryAccesses(2, 3)  # read x, write y; read x and dy, write dx
BINARY = MemoryAccesses(3, 3)
TWO_COPIES = MemoryAccesses(2, 2, 2)
EXPERT_ROWS = MemoryAccesses(7, 7, 7)
# Accesses per capped score, counted in the elementwise kernels around the plain matmuls of `attention/pairs.py`:
# they compute in fp32 on bf16 scores.
CAPPED_SCORES = MemoryAccesses(36.0, 52.0, 10)


@dataclass(frozen=True)
class ExecutionProfile:
    """Execution of a framework as far as a layout does not determine it; the numbers are counted from its kernels.

    Attributes:
        fuses_attention: fused attention, whose scores never reach device memory; otherwise `scores` applies.
        scores: accesses per attention score, in the network's dtype.
        norm, add, activation: accesses per element of a norm's input, of a residual addition, of an activation's input.
        dropout: accesses per element of the residual stream, on top of `add`.
        layout: accesses per element of q, k, v and attention's output to split, transpose and copy them.
        copies_concats: concatenating gathered shards along a tensor's second dimension, or splitting a tensor along it
            to be scattered, takes a copy.
        rotary: accesses per element of q and k.
        rows: accesses per element of the rows of experts: they are copied to the order of experts and back, weighted,
            and their slots added.
        bias_grad: accesses per element of a linear's output to compute its bias gradient.
        grad_bytes: bytes moved per weight and microbatch to accumulate a gradient into main_grad.
        fuses_grad_sum: the wgrad GEMM accumulates into main_grad where no axis reduces the gradient.
        logit_bytes: bytes moved per logit by the loss and its gradient, the GEMMs not included; None: those of this
            framework's kernels, which take chunks of tokens.
        optimizer_bytes: bytes moved per parameter besides the update: norm, clipping, copy to the network's dtype.
        reduce_itemsize: bytes of a gradient element in the data-parallel reduction; None: as accumulated.
        wgrad_itemsize: bytes of an element of dW in its reduction over tensor axes, if wider than the network's dtype.
        overlaps_reduction: the data-parallel gradient reduction overlaps with the last backward.
        overlaps_gather: ZeRO's weight all-gather overlaps with the forward.
        overlaps_pipeline: send/recv between stages overlaps with computation; otherwise both ranks wait.
        scatters_pipeline: activations that tensor-parallel ranks replicate are sent in shards and all-gathered by the
            receivers (Megatron-LM's scatter/gather).
        overlaps_input_grad: the reduction of a linear's input gradient overlaps with its wgrad GEMM.
        overlaps_shared_experts: tokens are on their way to the ranks of their experts during the shared experts' GEMMs.
        stops_recomputation: the recomputation of a layer ends before its last linear: backward needs only its input.
        chunks_operands: linears move operands in as many chunks as ranks, each overlapping with the GEMM of another.
        validates_later: with a split backward, ranks start their optimizer step without waiting for each other and
            validate the gradient norm later, so that the slowest rank's own time decides (Qi et al. 2023, section 4).
        stage_division: how layers are divided into pipeline stages: `balanced` as here, `equal`, or `filled` one after
            another (`divided_as`).
        reduces_buckets: each bucket of gradients is reduced, and its weights all-gathered, with a latency of its own.
        bucket_itemsize: bytes of an element of buckets that hold all gradients a second time where ranks reduce them.
        fitted: terms that are fitted to published runs (`FittedTerms`).
    """

    name: str
    fuses_attention: bool = True
    scores: MemoryAccesses = NO_ACCESS
    norm: MemoryAccesses = UNARY
    add: MemoryAccesses = BINARY
    dropout: MemoryAccesses = NO_ACCESS
    activation: MemoryAccesses = UNARY
    layout: MemoryAccesses = TWO_COPIES
    rotary: MemoryAccesses = TWO_COPIES
    rows: MemoryAccesses = EXPERT_ROWS
    copies_concats: bool = False
    bias_grad: float = 1.0
    grad_bytes: float = 10.0
    fuses_grad_sum: bool = False
    logit_bytes: float | None = 48.0
    optimizer_bytes: float = 12.0
    reduce_itemsize: int | None = None
    wgrad_itemsize: int = 0
    overlaps_reduction: bool = True
    overlaps_gather: bool = True
    overlaps_pipeline: bool = True
    scatters_pipeline: bool = True
    chunks_operands: bool = False
    overlaps_input_grad: bool = True
    overlaps_shared_experts: bool = False
    stops_recomputation: bool = False
    validates_later: bool = False
    stage_division: Literal["balanced", "equal", "filled"] = "balanced"
    reduces_buckets: bool = False
    bucket_itemsize: int = 0
    fitted: FittedTerms = NEUTRAL

    def unfused_scores(self, is_capped: bool) -> MemoryAccesses | None:
        """Return the accesses per attention score, None where attention is fused; no fused kernel caps scores."""
        if is_capped:
            return CAPPED_SCORES
        return None if self.fuses_attention else self.scores


# torch's own kernels, and ours.
# grad_bytes: read the gradient (2), add it to fp32 main_grad (4 + 4).
# optimizer_bytes: gradient norm (4), cast to the network's dtype (4 + 2).
# rotary, not compiled: two multiplications (4), rotate-half (3) and an addition (3), and as many backward.
OURS = ExecutionProfile(
    "megatron3d",
    rotary=MemoryAccesses(10, 10, 5),
    copies_concats=True,
    fuses_grad_sum=True,
    logit_bytes=None,
    optimizer_bytes=10.0,
    wgrad_itemsize=4,
    overlaps_shared_experts=True,
)


FITTED = Path(__file__).with_name("fitted.yaml")
# Between the names of a practice and of a kind of accelerator.
ON = " on "

# torch's own kernels, compiled.  Its checkpointing recomputes a layer as far as the last tensor that backward needs,
# which is the input of the last linear.
PYTORCH = ExecutionProfile("PyTorch", stops_recomputation=True, logit_bytes=44.0, optimizer_bytes=10.0)

# Megatron-LM as Narayanan et al. 2021 (arXiv:2104.04473, section 4.2) describe it: fused bias and GELU; fused bias,
# dropout and addition; fused scale, mask and softmax; everything else by torch.
# scores, in fp16 accesses: forward softmax (reads the causal half, writes all) 1.5, dropout 2 and its byte mask 0.5;
# backward dropout 2.5, softmax 3, each on all scores.
# grad_bytes: gradients are accumulated in fp16 (2 + 2 + 2).
# optimizer_bytes: cast to fp32 (2 + 4), unscale and check for infinities (8), norm (4), clip (8), cast back (4 + 2).
MEGATRON_2021 = ExecutionProfile(
    "Megatron-LM, 2021",
    stage_division="equal",
    fuses_attention=False,
    scores=MemoryAccesses(4.0, 5.5, 2),
    dropout=MemoryAccesses(0.5, 2.5),
    layout=MemoryAccesses(4, 4, 2),
    grad_bytes=6.0,
    logit_bytes=50.0,
    optimizer_bytes=32.0,
    reduce_itemsize=2,
    overlaps_reduction=False,
    overlaps_gather=False,
    overlaps_pipeline=False,
    overlaps_input_grad=False,
)

# One year later (Korthikanti et al. 2022, arXiv:2205.05198): sequence parallelism, and the dgrad reduction overlaps
# with the wgrad GEMM.
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM, 2022", overlaps_input_grad=True)

# Another year later: `gradient_accumulation_fusion`, fp32 gradients accumulated by the GEMM (reads and writes 4 bytes),
# and the distributed optimizer's fp32 reduction over the data axis.
MEGATRON_2023 = replace(
    MEGATRON_2022, name="Megatron-LM, 2023", grad_bytes=8.0, fuses_grad_sum=True, reduce_itemsize=None
)

# Its fork with zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241, section 4), which validates the optimizer step
# later.
ZERO_BUBBLE = replace(MEGATRON_2023, name="Zero Bubble, 2023", validates_later=True)

# Megatron-Core 0.8 with Transformer Engine: fused attention, gradient accumulation as in 2023, `--tp-comm-overlap`,
# `--overlap-grad-reduce`, `--overlap-param-gather`.
MEGATRON_CORE = ExecutionProfile(
    "Megatron-Core 0.8",
    stage_division="equal",
    grad_bytes=8.0,
    fuses_grad_sum=True,
    layout=NO_ACCESS,
    logit_bytes=54.0,
    optimizer_bytes=18.0,
    chunks_operands=True,
)

# llm.c of 2024: kernels of its own for everything between the GEMMs.  A residual addition writes its sum and the next
# norm's output; a norm's backward adds to the residual's gradient in place; the loss reads the logits twice and
# overwrites them with their gradient (2 + 2 + 2); bf16 gradients are accumulated by the GEMM (2 + 2) and reduced in
# bf16.  optimizer_bytes: norm (2) and the cast (2), less the 2 that AdamW saves with a gradient in bf16.
LLM_C = ExecutionProfile(
    "llm.c",
    norm=MemoryAccesses(2, 4),
    add=MemoryAccesses(2, 0),
    layout=NO_ACCESS,
    grad_bytes=4.0,
    fuses_grad_sum=True,
    logit_bytes=6.0,
    optimizer_bytes=2.0,
    reduce_itemsize=2,
)

# torchtitan, OLMo-core and their kin: parameters sharded over all data-parallel ranks by FSDP units.
PYTORCH_FSDP = replace(PYTORCH, name="PyTorch FSDP")

# AxoNN of 2023, with the model and the checkpointing of Megatron-LM, which recomputes whole layers.
AXONN = replace(PYTORCH, name="AxoNN", stops_recomputation=False)

# nanotron (Hugging Face): eager kernels of torch with FlashAttention 2; the distributed optimizer's all-gather and the
# sends of the pipeline are not overlapped, the gradient reduction is, in the buckets of torch's DDP, which hold the
# bf16 gradients beside those that are accumulated in fp32.
NANOTRON = replace(
    PYTORCH,
    name="nanotron",
    rotary=MemoryAccesses(10, 10, 5),
    overlaps_gather=False,
    overlaps_pipeline=False,
    overlaps_input_grad=False,
    stage_division="filled",
    reduces_buckets=True,
    bucket_itemsize=2,
)

# Megatron-DeepSpeed: kernels of Megatron-LM of its time, gradients reduced in 16 bits and overlapped.
DEEPSPEED = replace(MEGATRON_2021, name="DeepSpeed", overlaps_reduction=True)

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
