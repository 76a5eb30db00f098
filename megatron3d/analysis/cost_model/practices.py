"""Execution profiles of the frameworks whose runs can be predicted, by the names that `practice` takes.

Each number of a profile is counted from the kernels that the framework ran; `ExecutionProfile` defines the fields.
What cannot be counted is fitted to published runs and stands in `fitted.yaml`, which
`benchmarks/fit_cost_model.py` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from megatron3d.analysis.cost_model.execution_profile import NO_ACCESS, OURS, ExecutionProfile, MemoryAccesses
from megatron3d.analysis.cost_model.fitted_terms import NEUTRAL, FittedTerms
from megatron3d.config.suggest import nearest, one_of
from megatron3d.config.yaml_origins import read_yaml
from megatron3d.errors import UserError
from megatron3d.runtime.limits import shorten

FITTED = Path(__file__).with_name("fitted.yaml")
# Between the names of a practice and of a kind of accelerator.
ON = " on "

# torch's own kernels, compiled.  Its checkpointing recomputes a layer as far as the last tensor that backward needs,
# which is the input of the last linear.
PYTORCH = ExecutionProfile("PyTorch", stops_recomputation=True, logit_bytes=44.0, optimizer_bytes=38.0)

# Megatron-LM as Narayanan et al. 2021 (arXiv:2104.04473, section 4.2) describe it: fused bias and GELU; fused bias,
# dropout and addition; fused scale, mask and softmax; everything else by torch.
# scores, in fp16 accesses: forward softmax (reads the causal half, writes all) 1.5, dropout 2 and its byte mask 0.5;
# backward dropout 2.5, softmax 3, each on all scores.
# grad_bytes: gradients are accumulated in fp16 (2 + 2 + 2).
# optimizer_bytes: cast to fp32 (2 + 4), unscale and check for infinities (8), norm (4), clip (8), Adam (16 + 12), cast
# back (4 + 2).
MEGATRON_2021 = ExecutionProfile(
    "Megatron-LM, 2021",
    stage_division="equal",
    fuses_attention=False,
    scores=MemoryAccesses(4.0, 5.5, 2),
    dropout=MemoryAccesses(0.5, 2.5),
    layout=MemoryAccesses(4, 4, 2),
    grad_bytes=6.0,
    logit_bytes=50.0,
    optimizer_bytes=60.0,
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
    optimizer_bytes=46.0,
    ring_panels=True,
)

# llm.c of 2024: kernels of its own for everything between the GEMMs.  A residual addition writes its sum and the next
# norm's output; a norm's backward adds to the residual's gradient in place; the loss reads the logits twice and
# overwrites them with their gradient (2 + 2 + 2); bf16 gradients are accumulated by the GEMM (2 + 2) and reduced in
# bf16.  optimizer_bytes: norm (2), AdamW with fp32 master weights (2 + 24), and the cast (2).
LLM_C = ExecutionProfile(
    "llm.c",
    norm=MemoryAccesses(2, 4),
    add=MemoryAccesses(2, 0),
    layout=NO_ACCESS,
    grad_bytes=4.0,
    fuses_grad_sum=True,
    logit_bytes=6.0,
    optimizer_bytes=30.0,
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
