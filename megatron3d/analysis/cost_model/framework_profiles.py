"""What a program does beside the products that a layout prescribes: passes over memory, and what overlaps what.

A pass reads or writes each element of a tensor once.  Programs whose published times the model is held against differ
from ours in these numbers alone, and each is counted from the kernels that the program ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Passes(NamedTuple):
    """How often memory is passed over per element, forward and backward, and by how many kernels."""

    forward: float
    backward: float
    num_kernels: int = 1


NONE, TWO_AND_THREE, THREE, COPIES = Passes(0, 0), Passes(2, 3), Passes(3, 3), Passes(2, 2, 2)


@dataclass(frozen=True)
class Practice:
    """A program's habits.

    Attributes:
        fuses_attention: no score reaches memory; else passes over scores, in the elements of the network's type.
        norm, add, activation: of a norm's, a residual's and an activation's elements.
        dropout: of the residual, beside `add`.
        layout: of q, k and v and attention's output: cutting, turning and copying them.
        copies_joins: pieces that are gathered along a tensor's second dimension, or scattered, are copied together.
        rotary: of the elements of q and k.
        bias_grad: passes over the outputs of a linear for the gradient of its bias.
        grad_bytes: per weight and microbatch, to add a gradient to the sum of those before.
        fuses_grad_sum: where no axis sums a gradient, that is a part of the product that makes it, and hidden under it.
        logit_bytes: per logit, for loss and gradient, beside the products.
        optimizer_bytes: per parameter that a rank updates: norm, clipping, update, and the copy for the network.
        reduce_itemsize: bytes of a gradient on its way over the data axis; None: of the sum.
        overlaps_reduction: gradients are summed over the data axis under the last backward.
        overlaps_gather: parts of weights are gathered under the forward.
        overlaps_pipeline: transfers between stages run under computation; else both ends wait for them.
        scatters_pipeline: what ranks hold copies of is sent once, in parts, and gathered at the other end.
        overlaps_input_grad: a linear's input gradient is summed under the product of its weight's gradient.
        ring_panels: linears move their operands in as many panels as ranks, under their products.
    """

    name: str
    fuses_attention: bool = True
    scores: Passes = NONE
    norm: Passes = TWO_AND_THREE
    add: Passes = THREE
    dropout: Passes = NONE
    activation: Passes = TWO_AND_THREE
    layout: Passes = COPIES
    rotary: Passes = COPIES
    copies_joins: bool = False
    bias_grad: float = 1.0
    grad_bytes: float = 10.0
    fuses_grad_sum: bool = False
    logit_bytes: float = 48.0
    optimizer_bytes: float = 40.0
    reduce_itemsize: int | None = None
    overlaps_reduction: bool = True
    overlaps_gather: bool = True
    overlaps_pipeline: bool = True
    scatters_pipeline: bool = True
    ring_panels: bool = False
    overlaps_input_grad: bool = True


# torch's own operations, and ours.  grad_bytes: read the gradient (2), add it to an fp32 sum (4 + 4).  logit_bytes: to
# fp32 (2 + 4), largest (4), subtract and exponentiate (16), sum (4), scale (8), to the network's type (4 + 2).
# optimizer_bytes: norm (4), AdamW (16 + 12), copy to the network's type (4 + 2).
PYTORCH = Practice("PyTorch", logit_bytes=44.0, optimizer_bytes=38.0)
# rotary, not compiled: two products (4), halves changed round (3) and an addition (3), and as many backward.
OURS = replace(PYTORCH, name="megatron3d", fuses_grad_sum=True, rotary=Passes(10, 10, 5), copies_joins=True)

# Megatron-LM as Narayanan et al. 2021 (arXiv:2104.04473, section 4.2) describe it: fused bias with gelu, fused bias,
# dropout and addition, fused scale, mask and softmax; everything else as torch does it.  Scores, in passes of fp16:
# forward softmax (reads the causal half, writes all) 1.5, dropout 2 and a mask of a byte 0.5; backward dropout 2.5,
# softmax 3, both on all.  Sums of gradients in fp16, so that one takes 2 + 2 + 2 bytes.  optimizer_bytes: copy to fp32
# (2 + 4), unscale and look for infinities (8), norm (4), clip (8), Adam (16 + 12), copy back (4 + 2).
MEGATRON_2021 = Practice(
    "Megatron-LM, 2021",
    fuses_attention=False,
    scores=Passes(4.0, 5.5, 2),
    dropout=Passes(0.5, 2.5),
    layout=Passes(4, 4, 2),
    grad_bytes=6.0,
    logit_bytes=50.0,
    optimizer_bytes=60.0,
    reduce_itemsize=2,
    overlaps_reduction=False,
    overlaps_gather=False,
    overlaps_pipeline=False,
    overlaps_input_grad=False,
)

# The same a year later (Korthikanti et al. 2022, arXiv:2205.05198): with sequence parallelism, and with the sum of the
# input's gradient under the product of the weight's.
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM, 2022", overlaps_input_grad=True)

# Another year later: `gradient_accumulation_fusion`, sums of gradients in fp32 as part of the product (reads and writes
# 4 bytes), and the distributed optimizer's fp32 sums over the data axis.
MEGATRON_2023 = replace(
    MEGATRON_2022, name="Megatron-LM, 2023", grad_bytes=8.0, fuses_grad_sum=True, reduce_itemsize=None
)

# Megatron-Core 0.8 with Transformer Engine: fused attention, sums of gradients as a year before, `--tp-comm-overlap`,
# `--overlap-grad-reduce`, `--overlap-param-gather`.
MEGATRON_CORE = Practice(
    "Megatron-Core 0.8",
    grad_bytes=8.0,
    fuses_grad_sum=True,
    layout=NONE,
    logit_bytes=54.0,
    optimizer_bytes=46.0,
    ring_panels=True,
)

# llm.c of 2024: kernels of its own for all between the products.  An addition writes its sum and what the next norm
# makes of it; a norm's backward adds to the residual's gradient in place; loss and gradient read the logits twice and
# overwrite them (2 + 2 + 2); bf16 gradients are added in the product (2 + 2), and summed in bf16.  optimizer_bytes:
# norm (2), AdamW with fp32 weights (2 + 24), and the copy (2).
LLM_C = Practice(
    "llm.c",
    norm=Passes(2, 4),
    add=Passes(2, 0),
    layout=NONE,
    grad_bytes=4.0,
    fuses_grad_sum=True,
    logit_bytes=6.0,
    optimizer_bytes=30.0,
    reduce_itemsize=2,
)

PRACTICES: Mapping[str, Practice] = {
    each.name: each for each in (OURS, PYTORCH, MEGATRON_2021, MEGATRON_2022, MEGATRON_2023, MEGATRON_CORE, LLM_C)
}
