"""Execution profiles of the frameworks whose published runs the cost model is compared with.

Each number is counted from the kernels that the framework ran; `ExecutionProfile` defines the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron3d.analysis.cost_model.execution_profile import NO_ACCESS, OURS, ExecutionProfile, MemoryAccesses

# torch's own kernels, compiled.
PYTORCH = ExecutionProfile("PyTorch", logit_bytes=44.0, optimizer_bytes=38.0)

# Megatron-LM as Narayanan et al. 2021 (arXiv:2104.04473, section 4.2) describe it: fused bias and GELU; fused bias,
# dropout and addition; fused scale, mask and softmax; everything else by torch.
# scores, in fp16 accesses: forward softmax (reads the causal half, writes all) 1.5, dropout 2 and its byte mask 0.5;
# backward dropout 2.5, softmax 3, each on all scores.
# grad_bytes: gradients are accumulated in fp16 (2 + 2 + 2).
# optimizer_bytes: cast to fp32 (2 + 4), unscale and check for infinities (8), norm (4), clip (8), Adam (16 + 12), cast
# back (4 + 2).
MEGATRON_2021 = ExecutionProfile(
    "Megatron-LM, 2021",
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

# Megatron-Core 0.8 with Transformer Engine: fused attention, gradient accumulation as in 2023, `--tp-comm-overlap`,
# `--overlap-grad-reduce`, `--overlap-param-gather`.
MEGATRON_CORE = ExecutionProfile(
    "Megatron-Core 0.8",
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

PROFILES: Mapping[str, ExecutionProfile] = {
    profile.name: profile
    for profile in (OURS, PYTORCH, MEGATRON_2021, MEGATRON_2022, MEGATRON_2023, MEGATRON_CORE, LLM_C)
}
