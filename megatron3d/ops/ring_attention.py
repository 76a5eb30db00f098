"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values move round the context ranks during attention.

    forward     kv of the next step in flight | pairs of this step, merged by log-sum-exp
    backward    kv of the next step and the gradients of the step before in flight | gradients of this step's pairs

The gradients of a block of keys and values travel with it, in fp32 or wider, and are sent home after the last step.
Half of a rank's own pairs are computed while the first block comes, the other half while its own gradients come home.
On one rank there is no other step, and this is attention in chunks, whose memory grows with the length of sequences.

Letters: B sequences, N query heads, G key/value heads, L positions of this rank, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron3d.comm.interface import Comm, Pending, completed
from megatron3d.ops.attention_pairs import Merged, MergedGrads
from megatron3d.ops.attention_softmax import PLAIN_SOFTMAX, Softmax, add_sink, sink_grad
from megatron3d.ops.capped_attention import capped_kernel
from megatron3d.parallel.context_ring import RingPlan
from megatron3d.parallel.mesh import Axes


def ring_attention(
    q_BNLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    plan: RingPlan,
    axes: Axes,
    comm: Comm,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Return attention [B, N, L, D] of this rank's positions to those that all ranks over `axes` hold."""
    y: Tensor = _RingAttention.apply(q_BNLD, k_BGLD, v_BGLD, softmax.sink_N, softmax.softcap, plan, axes, comm)
    return y


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNLD: Tensor,
        k_BGLD: Tensor,
        v_BGLD: Tensor,
        sink_N: Tensor | None,
        softcap: float | None,
        plan: RingPlan,
        axes: Axes,
        comm: Comm,
    ) -> Tensor:
        kv, ctx.kernel = torch.stack((k_BGLD, v_BGLD)), capped_kernel(softcap)
        merged, blocks = Merged(q_BNLD, plan.window, ctx.kernel), _Blocks(kv, plan, axes, comm)
        merged.add(kv, plan.own)
        for step in plan.steps:
            merged.add(blocks.next(), step.pairs)
        out, lse = add_sink(*merged.result(), sink_N)
        y = out.to(q_BNLD.dtype)
        ctx.save_for_backward(q_BNLD, kv, sink_N, y, lse)
        ctx.plan, ctx.axes, ctx.comm = plan, axes, comm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink_N, y, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        grads, blocks = MergedGrads(dy, q, (y, lse), plan.window, ctx.kernel), _Blocks(kv, plan, ctx.axes, ctx.comm)
        own = torch.zeros_like(kv, dtype=grads.dq.dtype)
        grads.add(kv, own, plan.own_parts[0])
        travelling = _travel_home(grads, blocks, plan, ctx.axes, ctx.comm) if plan.steps else None
        grads.add(kv, own, plan.own_parts[1])
        if travelling is not None:
            own += travelling.wait()
        dk, dv = own.to(kv.dtype)
        return grads.dq.to(q.dtype), dk, dv, sink_grad(dy, y, lse, sink_N), None, None, None, None


def _travel_home(grads: MergedGrads, blocks: _Blocks, plan: RingPlan, axes: Axes, comm: Comm) -> Pending:
    """Compute the steps of other ranks' keys and values; return the gradients of this rank's that they computed."""
    before: Pending | None = None
    sent: Tensor | None = None
    homeward = plan.size - plan.steps[-1].behind
    for step, move in zip(plan.steps, (*plan.moves[1:], homeward), strict=True):
        kv = blocks.next()
        dkv = torch.zeros_like(kv, dtype=grads.dq.dtype)
        grads.add(kv, dkv, step.pairs)
        if before is not None:
            dkv += before.wait()
        before, sent = comm.shift(dkv, torch.empty_like(dkv), axes, move), dkv
    assert before is not None and sent is not None, "a ring has a step"
    last, kept = before, sent  # what is sent must live until the wait
    return Pending(lambda: (last.wait(), kept)[0])


class _Blocks:
    """Keys and values of the steps of a plan, in order, each in flight while the one before is used."""

    def __init__(self, kv: Tensor, plan: RingPlan, axes: Axes, comm: Comm) -> None:
        self._axes, self._comm = axes, comm
        self._moves = list(plan.moves)
        self._kv, self._pending = kv, completed(kv)
        self._start()

    def _start(self) -> None:
        if self._moves:
            out = torch.empty_like(self._kv)
            self._pending = self._comm.shift(self._kv, out, self._axes, self._moves.pop(0))

    def next(self) -> Tensor:
        """Wait for the block of the next step, and start to move it on to the step after it."""
        self._kv = self._pending.wait()
        self._start()
        return self._kv
