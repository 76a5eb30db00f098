"""Execution profile of a framework: the memory-bound kernels around its GEMMs, and which communication it overlaps.

The profile of this framework is `OURS`.  Profiles of frameworks whose published step times validate the cost model
differ from it in these numbers alone (`practices.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron3d.analysis.cost_model.fitted_terms import NEUTRAL, FittedTerms


class MemoryAccesses(NamedTuple):
    """Reads and writes of each element of a tensor by memory-bound kernels, forward and backward, and their number."""

    forward: float
    backward: float
    num_kernels: int = 1


NO_ACCESS = MemoryAccesses(0, 0)
UNARY = MemoryAccesses(2, 3)  # read x, write y; read x and dy, write dx
BINARY = MemoryAccesses(3, 3)
TWO_COPIES = MemoryAccesses(2, 2, 2)
# Accesses per capped score, counted in the elementwise kernels around the plain matmuls of `ops/attention_pairs.py`:
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
        bias_grad: accesses per element of a linear's output to compute its bias gradient.
        grad_bytes: bytes moved per weight and microbatch to accumulate a gradient into main_grad.
        fuses_grad_sum: the wgrad GEMM accumulates into main_grad where no axis reduces the gradient.
        logit_bytes: bytes moved per logit by the loss and its gradient, the GEMMs not included; None: those of this
            framework's kernels, which take chunks of tokens.
        optimizer_bytes: bytes moved per updated parameter: norm, clipping, update, and the copy to the network's dtype.
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
        ring_panels: linears move their operands in as many panels as ranks, each overlapping with the GEMM of another.
        validates_later: with a split backward, ranks start their optimizer step without waiting for each other and
            validate the gradient norm later, so that the slowest rank's own time decides (Qi et al. 2023, section 4).
        stage_division: how layers are divided into pipeline stages: `balanced` as here, `equal`, or `filled` one after
            another (`stage_division.py`).
        reduces_buckets: each bucket of gradients is reduced, and its weights all-gathered, with a latency of its own.
        bucket_itemsize: bytes of an element of buckets that hold all gradients a second time where ranks reduce them.
        fitted: terms that are fitted to published runs (`practices.py`).
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
    copies_concats: bool = False
    bias_grad: float = 1.0
    grad_bytes: float = 10.0
    fuses_grad_sum: bool = False
    logit_bytes: float | None = 48.0
    optimizer_bytes: float = 40.0
    reduce_itemsize: int | None = None
    wgrad_itemsize: int = 0
    overlaps_reduction: bool = True
    overlaps_gather: bool = True
    overlaps_pipeline: bool = True
    scatters_pipeline: bool = True
    ring_panels: bool = False
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
# optimizer_bytes: gradient norm (4), AdamW (16 + 12), cast to the network's dtype (4 + 2).
# rotary, not compiled: two multiplications (4), rotate-half (3) and an addition (3), and as many backward.
OURS = ExecutionProfile(
    "megatron3d",
    rotary=MemoryAccesses(10, 10, 5),
    copies_concats=True,
    fuses_grad_sum=True,
    logit_bytes=None,
    optimizer_bytes=38.0,
    wgrad_itemsize=4,
    overlaps_shared_experts=True,
)
