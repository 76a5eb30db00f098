"""LM head fused with cross-entropy: logits and their gradients exist for one chunk of tokens at a time.

    loss = sum over tokens of (log sum_v exp(logit_v) - logit_label) / number of tokens of the global batch

Maximum, sum and label's logit are combined over the axes that split the vocabulary, in fp32 or better (Shoeybi et al.
2019, section 3).  Letters: M tokens, C tokens of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm
from megatron3d.ops.collectives import W_DIMS, X_DIMS, Y_DIMS, gather, gather_dy, reduce
from megatron3d.ops.gemm import product
from megatron3d.ops.main_grad import MainGrads, WgradSum
from megatron3d.parallel.layout import span
from megatron3d.parallel.matmul_plan import MatmulPlan, moves
from megatron3d.parallel.mesh import Axes


@dataclass(frozen=True)
class LMHead:
    """The LM head's matmul and vocabulary.

    Attributes:
        plan: names no axis of size 1.
        chunk_tokens: tokens, after the all-gather of X, whose logits exist at a time.
        main_grads: buffers that the gradient of the head's weight is added to.
    """

    plan: MatmulPlan
    comm: Comm
    vocab_size: int
    padded_vocab_size: int
    chunk_tokens: int
    main_grads: MainGrads = field(default_factory=MainGrads)

    def logits(self, whole_x_CH: Tensor, whole_w_VH: Tensor) -> Tensor:
        """Return logits in Y's layout in fp32 or wider, minus infinity where the vocabulary is padded."""
        y_CV = reduce(product(whole_x_CH, whole_w_VH), moves(self.plan.y), Y_DIMS, self.comm).wait()
        y_CV = y_CV.to(torch.promote_types(y_CV.dtype, torch.float32))
        low, high = self.vocab_span
        if high > self.vocab_size:
            y_CV[:, max(self.vocab_size - low, 0) :] = float("-inf")
        return y_CV

    @property
    def vocab_span(self) -> tuple[int, int]:
        """Return the range of the padded vocabulary that this rank's logits cover."""
        return span(self.padded_vocab_size, self.plan.y_layout[1], self.comm.mesh)

    @property
    def token_moves(self) -> tuple[Axes, Axes]:
        """Return the axes over which tokens of X are all-gathered, and those over which tokens of Y are scattered."""
        gathered = tuple(axis for axis, dim in self.plan.x.items() if dim == "M")
        return gathered, tuple(axis for axis, dim in self.plan.y.items() if dim == "M")

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
    chunks = _chunks(x_MH.shape[0], head)
    dw = WgradSum(w_VH, head.plan, head.comm, head.main_grads) if torch.is_grad_enabled() else None
    loss = _HeadLoss.apply(x_MH, w_VH.detach(), labels_M, scale, num_tokens, head, chunks, dw)
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
    gathered, scattered = head.token_moves
    labels_C: Tensor = labels_M.unflatten(0, (mesh.size(gathered), -1))[:, chunk].flatten()
    low, high = span(labels_C.shape[0], scattered, mesh)
    return labels_C[low:high]


def _cross_entropy_(
    logits_CV: Tensor, labels_C: Tensor, num_tokens: int | Tensor, head: LMHead, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses over `num_tokens`, and `scale` times its gradient [C, V] in the logits' memory."""
    axes, (low, high) = head.plan.y_layout[1], head.vocab_span
    top_C = head.comm.all_reduce(logits_CV.amax(-1), axes, "max").wait()
    counted = labels_C >= 0
    mine = counted & (labels_C >= low) & (labels_C < high)
    column = (labels_C - low).masked_fill(~mine, 0).unsqueeze(-1)
    label_logit_C = (logits_CV.gather(-1, column).squeeze(-1) - top_C).masked_fill(~mine, 0)
    exp_CV = logits_CV.sub_(top_C.unsqueeze(-1)).exp_()
    sum_C, label_logit_C = head.comm.all_reduce(torch.stack((exp_CV.sum(-1), label_logit_C)), axes).wait()
    loss = (sum_C.log() - label_logit_C).masked_fill(~counted, 0).sum() / num_tokens
    grad_CV = exp_CV.mul_((scale / (sum_C * num_tokens)).masked_fill(~counted, 0).unsqueeze(-1))
    grad_CV.scatter_add_(-1, column, mine.to(grad_CV.dtype).unsqueeze(-1) * -scale / num_tokens)
    return loss, grad_CV


def _chunks(num_rows: int, head: LMHead) -> list[slice]:
    """Return the chunks of the rows of the stored X.

    A chunk has at most `chunk_tokens` tokens after the all-gather, and a number of rows that the scatter of Y divides
    (then it divides the last chunk as well).
    """
    gathered, scattered = (head.comm.mesh.size(axes) for axes in head.token_moves)
    unit = scattered // math.gcd(gathered, scattered)
    rows = max(head.chunk_tokens // (gathered * unit), 1) * unit
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


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
        plan, comm = head.plan, head.comm
        whole_w = head.whole_weight(w_VH)
        dx_chunks, losses = [], []
        for chunk in chunks:
            whole_x = gather(x_MH[chunk], plan.x, X_DIMS, comm).wait()
            labels_C = _chunk_labels(labels_M, chunk, head)
            loss, grad_CV = _cross_entropy_(head.logits(whole_x, whole_w), labels_C, num_tokens, head, scale)
            losses.append(loss)
            if dw is not None:
                dy = gather_dy(grad_CV.to(x_MH.dtype), plan, comm).wait()
                dx = reduce(product(dy, whole_w.T), plan.dx_moves, X_DIMS, comm)
                dw.add_product(dy.T, whole_x.T)
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
