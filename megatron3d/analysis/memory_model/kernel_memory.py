"""Memory that kernels keep for backward or work in, which depends on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMemory:
    """Memory that torch's kernels keep for backward, which depends on the device.

    Attributes:
        narrow_statistics: LayerNorm keeps mean and scale in its input's dtype, not in fp32.
        fused_rms_norm: RMSNorm keeps its input and a number per row; otherwise what each of its operations keeps.
        num_leaving: most shards in send: gloo does not report that one is done, and on a GPU the CPU runs ahead of them
            all, so that the engine's limit holds on both.
        num_received: additional whole buffers of a reduce-scatter: gloo receives all ranks' data and then adds.
        softmax_again: longest sequences for which bf16 attention keeps no number per row of scores.
        adds_dw: a chunk's dW of the LM head is multiplied apart and then added to main_grad, as bf16 and oneDNN's fp32
            kernel on a CPU do; others accumulate in the GEMM.
        sums_rows: backward of the embedding sums the gradients of each distinct token before it adds them to main_grad.
        fused_loss: the loss writes its gradient into the memory of the logits.
        update_piece: elements that AdamW updates at once if its moments are narrower than the weights.
        on_gpu: the run is on GPUs, whose buckets of gradients are larger by default.
        sdpa_workspace: the backward of fused attention has a workspace beyond its gradients.
        gemm_workspace: bytes that the GEMM library keeps as tensors.
        is_host: the device's memory is the host's, so that the copy of the state for an asynchronous save counts.
    """

    narrow_statistics: bool
    fused_rms_norm: bool
    num_leaving: int
    num_received: int
    softmax_again: int
    adds_dw: bool
    update_piece: int
    sums_rows: bool
    fused_loss: bool
    on_gpu: bool = False
    sdpa_workspace: bool = False
    gemm_workspace: int = 0
    is_host: bool = False


KERNELS: Mapping[str, KernelMemory] = {
    "cpu": KernelMemory(
        narrow_statistics=True,
        fused_rms_norm=False,
        num_leaving=4,
        num_received=1,
        softmax_again=512,
        adds_dw=True,
        update_piece=2**18,
        is_host=True,
        sums_rows=True,
        fused_loss=False,
    ),
    "gpu": KernelMemory(
        narrow_statistics=False,
        fused_rms_norm=True,
        num_leaving=5,  # those the engine lets be, and the one that it starts
        num_received=0,
        softmax_again=0,
        adds_dw=False,
        update_piece=2**22,
        on_gpu=True,
        sums_rows=False,
        fused_loss=True,
        sdpa_workspace=True,
        gemm_workspace=2 * 32 * 2**20,  # cuBLAS on Hopper, for the thread of forward and that of backward
    ),
}
