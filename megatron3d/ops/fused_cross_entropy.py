"""Cross-entropy of a vocabulary shard in two Triton kernels, which read the logits twice and write them once.

    statistics   m = max_v logit_v,  s = sum_v exp(logit_v - m),  label's logit      one pass, rescaled as m grows
    all-reduce   m over the shards, then s exp(m - max m) and the label's logit
    gradient     exp(logit_v - max m) * factor - (v is the label) * label's factor     in the logits' memory

A running sum that is rescaled where the maximum grows is by Milakov and Gimelshein 2018, arXiv:1805.02867.  A gradient
in bf16 or fp16 takes the first half of each row of the fp32 logits, so that it needs no memory of its own.
Letters: C tokens of one chunk, V this rank's vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.parallel.mesh import Axes


class VocabShard(NamedTuple):
    """Range of the padded vocabulary that this rank's logits cover, and the axes that split it."""

    low: int
    high: int
    axes: Axes
    comm: Comm


def fused_cross_entropy_(
    logits_CV: Tensor,
    labels_C: Tensor,
    num_tokens: int | Tensor,
    scale: Tensor | float,
    vocab: VocabShard,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `cross_entropy_` returns; the logits must be contiguous and in fp32.

    The gradient is a view of the logits' memory, with a row stride of V elements in fp32.
    """
    from megatron3d.ops.triton_cross_entropy import write_gradient, write_statistics

    counted_C = labels_C >= 0
    is_mine_C = counted_C & (labels_C >= vocab.low) & (labels_C < vocab.high)
    column_C = torch.where(is_mine_C, labels_C - vocab.low, -1)
    statistics_3C = logits_CV.new_empty((3, len(logits_CV)))
    write_statistics(logits_CV, column_C, statistics_3C)
    local_top_C, local_sum_C, label_logit_C = statistics_3C
    top_C = vocab.comm.all_reduce(local_top_C.clone(), vocab.axes, "max").wait()
    shares_2C = torch.stack(
        (local_sum_C * (local_top_C - top_C).exp(), (label_logit_C - top_C).masked_fill(~is_mine_C, 0))
    )
    sum_C, label_logit_C = vocab.comm.all_reduce(shares_2C, vocab.axes).wait()
    loss = (sum_C.log() - label_logit_C).masked_fill(~counted_C, 0).sum() / num_tokens
    if dtype is None:
        return loss, None
    factor_C = (scale / (sum_C * num_tokens)).masked_fill(~counted_C, 0)
    label_factor_C = is_mine_C.to(logits_CV.dtype) * scale / num_tokens
    grad_CV = logits_CV.view(dtype)[:, : logits_CV.shape[1]]
    write_gradient(logits_CV, column_C, torch.stack((top_C, factor_C, label_factor_C)), grad_CV)
    return loss, grad_CV
