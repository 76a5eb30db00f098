"""LM head fused with cross-entropy: logits and their gradients exist for one chunk of tokens at a time.

    loss = sum over tokens of (log sum_v exp(logit_v) - logit_label) / number of tokens of the global batch

Maximum, sum and label's logit are combined over the axes that split the vocabulary, in fp32 or better (Shoeybi et al.
2019, section 3).  `cross_entropy_` is the reference in torch's operations; on GPUs two Triton kernels compute the same:

    statistics   m = max_v logit_v,  s = sum_v exp(logit_v - m),  label's logit      one pass, rescaled as m grows
    all-reduce   m over the shards, then s exp(m - max m) and the label's logit
    gradient     exp(logit_v - max m) * factor - (v is the label) * label's factor     in the logits' memory

A running sum that is rescaled where the maximum grows is by Milakov and Gimelshein 2018, arXiv:1805.02867.  A gradient
in bf16 or fp16 takes the first half of each row of the fp32 logits, so that it needs no memory of its own.
Letters: M tokens, C tokens of one chunk, V this rank's vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.linear.collectives import W_DIMS, X_DIMS, Y_DIMS, gather, gather_dy, reduce
from megatron3d.linear.gemm import NATIVE, Gemm, Operand
from megatron3d.linear.main_grad import MainGrads, WgradSum
from megatron3d.ops.plan import LossChunk, token_moves
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import Axes
from megatron3d.runtime.machine import has_triton


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
    from megatron3d.ops.triton_kernels import write_logits_grad, write_vocab_statistics

    counted_C = labels_C >= 0
    is_mine_C = counted_C & (labels_C >= vocab.low) & (labels_C < vocab.high)
    column_C = torch.where(is_mine_C, labels_C - vocab.low, -1)
    statistics_3C = logits_CV.new_empty((3, len(logits_CV)))
    write_vocab_statistics(logits_CV, column_C, statistics_3C)
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
    write_logits_grad(logits_CV, column_C, torch.stack((top_C, factor_C, label_factor_C)), grad_CV)
    return loss, grad_CV


@dataclass(frozen=True)
class LMHead:
    """The LM head's matmul and vocabulary.

    Attributes:
        plan: names no axis of size 1.
        chunk: limit of the tokens whose logits exist at a time.
        main_grads: buffers that the gradient of the head's weight is added to.
        kernel: entry of `LOSS_KERNELS`; default: the fastest for the logits.
        softcap: c of c tanh(logit / c); None: logits are not bounded.
    """

    plan: MatmulPlan
    comm: Comm
    vocab_size: int
    padded_vocab_size: int
    chunk: LossChunk
    main_grads: MainGrads = field(default_factory=MainGrads)
    kernel: str | None = None
    softcap: float | None = None
    gemm: Gemm = NATIVE

    def logits(self, whole_x_CH: Tensor, whole_w_VH: Tensor) -> Tensor:
        """Return logits in Y's layout in fp32 or wider, minus infinity where the vocabulary is padded."""
        wide, steps = _wide(whole_x_CH.dtype), moves(self.plan.y)
        x, w = Operand(whole_x_CH), Operand(whole_w_VH)
        if steps or wide == whole_x_CH.dtype:
            y_CV = reduce(self.gemm.y(x, w), steps, Y_DIMS, self.comm).wait().to(wide)
        else:  # the GEMM itself writes fp32, where it can
            y_CV = whole_x_CH.new_empty((len(whole_x_CH), len(whole_w_VH)), dtype=wide)
            self.gemm.y(x, w, into_MN=y_CV)
        if self.softcap is not None:
            y_CV = y_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.shard.high > self.vocab_size:
            y_CV[:, max(self.vocab_size - self.shard.low, 0) :] = float("-inf")
        return y_CV

    def softcap_slope(self, logits_CV: Tensor) -> Tensor | None:
        """Return the derivative of the softcap, 1 - (logit / c)^2, from capped logits; 0 where they are padding."""
        return None if self.softcap is None else (logits_CV / self.softcap).square_().neg_().add_(1).clamp_(min=0)

    @cached_property
    def shard(self) -> VocabShard:
        """Shard of the vocabulary that this rank's logits cover."""
        axes = self.plan.y_layout[1]
        return VocabShard(*span(self.padded_vocab_size, axes, self.comm.mesh), axes, self.comm)

    def chunks(self, x_MH: Tensor) -> list[slice]:
        """Return the chunks of the rows of the stored X."""
        low, high = span(self.padded_vocab_size, self.plan.n, self.comm.mesh)
        token_bytes, num_rows = (high - low) * _wide(x_MH.dtype).itemsize, len(x_MH)
        rows = self.chunk.rows(num_rows, token_bytes, self.plan, self.comm.mesh)
        return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]

    def whole_weight(self, w_VH: Tensor) -> Tensor:
        """Return the all-gathered W."""
        return gather(w_VH, self.plan.w, W_DIMS, self.comm).wait()


def head_loss(
    x_MH: Tensor, w_VH: Tensor, labels_M: Tensor, num_tokens: int | Tensor, head: LMHead, scale: Tensor | float = 1.0
) -> Tensor:
    """Return the sum of this rank's token losses divided by `num_tokens`, a scalar; negative labels are ignored.

    The weight's gradient is computed and accumulated in the forward, so that no microbatch in flight holds one.  Hence
    backward must start at this loss; it gives the gradients of `scale` times the loss.

    Args:
        x_MH: in the stored layout of the plan's X.
        labels_M: labels of all tokens along the axes in `plan.m`.
    """
    dw = WgradSum(w_VH, head.plan, head.comm, head.main_grads, head.gemm) if torch.is_grad_enabled() else None
    loss = _HeadLoss.apply(x_MH, w_VH.detach(), labels_M, scale, num_tokens, head, head.chunks(x_MH), dw)
    if dw is not None and (reduction := dw.finish()) is not None:
        head.main_grads.add(w_VH, reduction.wait())
    return cast(Tensor, loss)


def head_logits(x_MH: Tensor, w_VH: Tensor, head: LMHead) -> Tensor:
    """Return all logits in Y's layout, without gradient; for sampling."""
    with torch.no_grad():
        whole_x = gather(x_MH, head.plan.x, X_DIMS, head.comm).wait()
        return head.logits(whole_x, head.whole_weight(w_VH))


def _chunk_labels(labels_M: Tensor, chunk: slice, head: LMHead) -> Tensor:
    """Return the labels of this rank's logits, where each rank along the gathered axes contributes rows `chunk`."""
    mesh = head.comm.mesh
    gathered, scattered = token_moves(head.plan)
    labels_C: Tensor = labels_M.unflatten(0, (mesh.size(gathered), -1))[:, chunk].flatten()
    low, high = span(labels_C.shape[0], scattered, mesh)
    return labels_C[low:high]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def cross_entropy_(
    logits_CV: Tensor,
    labels_C: Tensor,
    num_tokens: int | Tensor,
    scale: Tensor | float,
    vocab: VocabShard,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses over `num_tokens`, and `scale` times its gradient [C, V] if it has a dtype.

    The memory of the logits is overwritten.  Labels are global; negative ones are ignored.
    """
    axes, low, high, comm = vocab.axes, vocab.low, vocab.high, vocab.comm
    top_C = comm.all_reduce(logits_CV.amax(-1), axes, "max").wait()
    counted = labels_C >= 0
    mine = counted & (labels_C >= low) & (labels_C < high)
    column = (labels_C - low).masked_fill(~mine, 0).unsqueeze(-1)
    label_logit_C = (logits_CV.gather(-1, column).squeeze(-1) - top_C).masked_fill(~mine, 0)
    exp_CV = logits_CV.sub_(top_C.unsqueeze(-1)).exp_()
    sum_C, label_logit_C = comm.all_reduce(torch.stack((exp_CV.sum(-1), label_logit_C)), axes).wait()
    loss = (sum_C.log() - label_logit_C).masked_fill(~counted, 0).sum() / num_tokens
    if dtype is None:
        return loss, None
    grad_CV = exp_CV.mul_((scale / (sum_C * num_tokens)).masked_fill(~counted, 0).unsqueeze(-1))
    grad_CV.scatter_add_(-1, column, mine.to(grad_CV.dtype).unsqueeze(-1) * -scale / num_tokens)
    return loss, grad_CV.to(dtype)


# Arguments and results as those of `cross_entropy_`.
LOSS_KERNELS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "torch": cross_entropy_,
    "triton": fused_cross_entropy_,
}
LOSS_KERNEL_NAMES: Mapping[str, str] = {"torch": "torch's operations", "triton": "two Triton kernels"}


def loss_kernel(is_on_gpu: bool, dtype: torch.dtype) -> str:
    """Return the entry of `LOSS_KERNELS` that computes the loss of activations of a dtype."""
    return "triton" if is_on_gpu and _wide(dtype) == torch.float32 and has_triton() else "torch"


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MH: Tensor,
        w_VH: Tensor,
        labels_M: Tensor,
        scale: Tensor | float,
        num_tokens: int | Tensor,
        head: LMHead,
        chunks: list[slice],
        dw: WgradSum | None,
    ) -> Tensor:
        plan, comm, shard = head.plan, head.comm, head.shard
        cross_entropy = LOSS_KERNELS[head.kernel or loss_kernel(x_MH.is_cuda, x_MH.dtype)]
        grad_dtype = None if dw is None else x_MH.dtype
        whole_w = head.whole_weight(w_VH)
        dx_chunks, losses = [], []
        for chunk in chunks:
            whole_x = gather(x_MH[chunk], plan.x, X_DIMS, comm).wait()
            labels_C = _chunk_labels(labels_M, chunk, head)
            logits_CV = head.logits(whole_x, whole_w)
            slope_CV = None if dw is None else head.softcap_slope(logits_CV)
            loss, grad_CV = cross_entropy(logits_CV, labels_C, num_tokens, scale, shard, grad_dtype)
            if grad_CV is not None and slope_CV is not None:
                grad_CV = grad_CV.mul_(slope_CV)
            del logits_CV, slope_CV
            losses.append(loss)
            if dw is not None and grad_CV is not None:
                dy = gather_dy(grad_CV, plan, comm).wait()
                dx = reduce(head.gemm.dx(Operand(dy), Operand(whole_w)), plan.dx_moves, X_DIMS, comm)
                dw.add(Operand(dy), Operand(whole_x))
                dx_chunks.append(dx.wait())
                del dy
            del grad_CV  # otherwise the logits of two chunks would exist at once
        if dw is not None:
            ctx.save_for_backward(torch.cat(dx_chunks))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (dx_MH,) = ctx.saved_tensors
        return dx_MH, None, None, None, None, None, None, None
